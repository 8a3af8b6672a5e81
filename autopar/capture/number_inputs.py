"""Number inputs: Python numbers in the arguments of forward that are inputs of its program.

    pm.step(x, 0.1); pm.step(x, 0.2)      # a number that changes: captured as an input
    pm.step(x, 0.3)                       # no capture

Forward is given a number that notes what is asked of it, as of the number in a tensor
(`decisions.py`). Sums, products and quotients of it with tensors and numbers are calls of the
program, as long as Python computes the same: whole numbers that are large, and a division by zero,
are not the program's. Whatever else forward does with it (a branch, a shape, `math.exp`) is decided
by its value: a call in which the answer is another is another program.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.decisions import NotedNumber, ValueQueries
from autopar.capture.guard_questions import GuardQuestion, answer_of
from autopar.capture.hooks import replaced
from autopar.capture.number_formulas import DTYPES, NumberFormula, is_number

_NAMES = ("add", "sub", "mul", "div", "true_divide", "rsub", "truediv")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv")
}


@dataclass(frozen=True, eq=False, repr=False)
class NumberInput(NotedNumber):
    """A number in the arguments of forward, or one that is computed of such."""

    tensor: Tensor

    @classmethod
    def of(cls, tensor: Tensor, queries: ValueQueries) -> Any:
        """Return the number that a traced tensor of inputs holds."""
        noted = queries.of(tensor)
        if noted is None or len(noted.inputs) != 1:  # it would be taken for the tensor
            raise TypeError("no number of the arguments")
        (number,) = noted.inputs.values()
        formula = NumberFormula.argument(f"argument_{number}")
        inputs = {f"argument_{number}": number}
        return cls(noted.value, formula, inputs, {}, noted.made, tensor)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Be taken for a tensor where torch takes one or a number."""
        plain = [a.for_torch(function, args) if type(a) is cls else a for a in args]
        named = {k: v.itself if type(v) is cls else v for k, v in (kwargs or {}).items()}
        return function(*plain, **named)

    def for_torch(self, function: Any, args: Sequence[Any]) -> Any:
        """Return what a function of torch is given: a tensor in sums, products and quotients."""
        name = getattr(function, "__name__", "").strip("_").removeprefix("r")
        others = [arg for arg in args if isinstance(arg, Tensor)]
        if len(others) != 1 or len(args) != 2:
            return self.itself
        if name.removeprefix("i") not in _NAMES and name not in _NAMES:
            return self.itself
        other = others[0]
        if other.dtype not in (torch.float32, torch.float64):
            return self.itself
        return self.tensor if other.ndim else self.tensor.to(other.dtype)

    def _combined(self, name: str, other: Any, *, is_mirrored: bool) -> Any:
        function = _OPERATORS[name]
        if isinstance(other, Tensor):
            mine = self.for_torch(function, (self, other))
            if name == "truediv" and not is_mirrored:  # as torch divides a number by a tensor
                return other.reciprocal() * mine
            return function(other, mine) if is_mirrored else function(mine, other)
        is_input = type(other) is NumberInput
        number = other.value if is_input else other
        values = (number, self.value) if is_mirrored else (self.value, number)
        value: Any = answer_of(lambda: function(*values)) if is_number(number) else None
        if not is_number(value):
            return getattr(super(), f"__{'r' if is_mirrored else ''}{name}__")(other)
        kind: Any = type(value)
        operand = other.graph if is_input else other
        tensors = [self._as(kind), other._as(kind) if is_input else kind(number)]
        operands = [self.graph, operand]
        if is_mirrored:
            tensors, operands = tensors[::-1], operands[::-1]
        inputs = {**self.inputs, **(other.inputs if is_input else {})}
        return self._computed(function, value, operands, inputs, function(*tensors))

    def _computed(
        self,
        function: Callable[..., Any],
        value: float,
        operands: Sequence[Any],
        inputs: Mapping[str, int],
        tensor: Tensor,
    ) -> NumberInput:
        """Return what a function gives of numbers, where it is a number in later calls, too."""
        formula = NumberFormula(function, tuple(operands))
        computed = NumberInput(value, formula, inputs, {}, self.made, tensor)
        computed.asked(GuardQuestion("class of number"))
        return computed

    def _as(self, kind: type) -> Tensor:
        return self.tensor.to(DTYPES[kind])

    def __neg__(self) -> Any:
        return self._computed(operator.neg, -self.value, [self.graph], self.inputs, -self.tensor)


def _method(name: str, *, is_mirrored: bool) -> Callable[[NumberInput, Any], Any]:
    def combine(self: NumberInput, other: Any) -> Any:
        return self._combined(name, other, is_mirrored=is_mirrored)

    return combine


for _name in _OPERATORS:
    setattr(NumberInput, f"__{_name}__", _method(_name, is_mirrored=False))
    setattr(NumberInput, f"__r{_name}__", _method(_name, is_mirrored=True))


@contextmanager
def numbers_given(
    model: nn.Module, numbers: Collection[int | str], queries: ValueQueries
) -> Iterator[None]:
    """While forward is followed, give it numbers in the place of some tensors: positional arguments
    by number, and keywords."""
    if not numbers:
        yield
        return
    forward, is_running = model.forward, False

    @functools.wraps(forward)
    def given(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:  # it calls itself
            return forward(*args, **kwargs)
        is_running = True
        try:
            positional = [
                NumberInput.of(arg, queries) if at in numbers else arg
                for at, arg in enumerate(args)
            ]
            named = {
                name: NumberInput.of(arg, queries) if name in numbers else arg
                for name, arg in kwargs.items()
            }
            return forward(*positional, **named)
        finally:
            is_running = False

    with replaced(model, "forward", given):
        yield
