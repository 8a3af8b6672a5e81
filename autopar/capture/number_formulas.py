"""Number formulas: how Python computes numbers from the number arguments of a call.

    weight = NumberFormula.argument("weight")
    rest = NumberFormula(operator.sub, (1, weight))
    rest.value({"weight": 0.25}, {})                # 0.75

A program computes with the same numbers in tensors. It does what Python does as long as every value
stays one that a tensor holds exactly (`is_number`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {int: torch.int64, float: torch.float64}
_LARGEST = 1 << 53  # of whole numbers, which are exact as floats, too


def number_tensor(value: float) -> Tensor:
    """Return a number as an input of a program."""
    return torch.tensor(value, dtype=DTYPES[type(value)])


def is_number(value: Any) -> bool:
    """Return whether a tensor holds a value exactly: a float, or an int that a float holds, too.

    nan is none: Python gives it another hash each time."""
    if type(value) is float:
        return value == value
    return type(value) is int and abs(value) <= _LARGEST


def class_of_number(value: Any) -> type | None:
    """Return whether a value is an int or a float; None if a tensor does not hold it."""
    return type(value) if is_number(value) else None


@dataclass(frozen=True, eq=False)
class NumberFormula:
    """A number that Python computes of numbers and other formulas."""

    function: Callable[..., Any] | None  # None: an argument of the call, which the operand names
    operands: tuple[Any, ...]

    @classmethod
    def argument(cls, name: str) -> NumberFormula:
        """Return the number that is an argument."""
        return cls(None, (name,))

    def value(self, given: Mapping[str, Any], known: dict[int, Any]) -> Any:
        """Return the number for these arguments, or raise as Python does.

        `known`: the values of other formulas, by identity, to which those on the way are added."""
        waiting = [self]
        while waiting:
            formula = waiting[-1]
            missing = [inner for inner in formula._inner() if id(inner) not in known]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if formula.function is None:
                known[id(formula)] = given[formula.operands[0]]
            else:
                values = (
                    known[id(operand)] if isinstance(operand, NumberFormula) else operand
                    for operand in formula.operands
                )
                known[id(formula)] = formula.function(*values)
        return known[id(self)]

    def _inner(self) -> list[NumberFormula]:
        return [inner for inner in self.operands if isinstance(inner, NumberFormula)]
