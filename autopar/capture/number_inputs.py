"""Number inputs: Python numbers in the arguments of forward that are inputs of its program.

    pm.step(x, 0.1); pm.step(x, 0.2)      # a number that changes: captured as an input
    pm.step(x, 0.3)                       # no capture

Forward is given a number that notes what is asked of it, as of the number in a tensor
(`decisions.py`). Sums, products and quotients of it with tensors and numbers are calls of the
program. Whatever else forward does with it (a branch, a shape, `math.exp`) is decided by its value:
a call in which the answer is another is another program.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.decisions import NotedNumber, ValueQueries
from autopar.capture.hooks import replaced
from autopar.capture.python_state import PythonState

DTYPES = {int: torch.int64, float: torch.float64}
_LARGEST = 1 << 62  # of whole numbers, whose sums a tensor holds
_NAMES = ("add", "sub", "mul", "div", "true_divide", "rsub", "truediv")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv")
}


def number_tensor(value: float) -> Tensor:
    """Return a number as an input of a program."""
    return torch.tensor(value, dtype=DTYPES[type(value)])


def may_take_numbers(model: nn.Module) -> bool:
    """Return whether no code of a model asks for the class of anything, as by `type(x) is float`,
    to which a number input gives another answer than `isinstance` does."""
    return "type" not in PythonState(model).names


def is_number(value: Any) -> bool:
    """Return whether a value can be an input: a float, or an int that a tensor holds."""
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


@dataclass(frozen=True, eq=False, repr=False)
class NumberInput(NotedNumber):
    """A number in the arguments of forward, or one that is computed of such."""

    tensor: Tensor
    queries: ValueQueries

    @classmethod
    def of(cls, tensor: Tensor, queries: ValueQueries) -> Any:
        """Return the number that a traced tensor of inputs holds."""
        noted = queries.of(tensor)
        if noted is None:  # it would be taken for the tensor
            raise TypeError("a number that follows from more than numbers")
        return cls(
            noted.value, noted.graph, noted.inputs, noted.constants, noted.made, tensor, queries
        )

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
        if not other.is_floating_point():
            return self.itself
        if other.ndim:
            return self.tensor
        is_wide = other.dtype in (torch.float32, torch.float64)
        return self.tensor.to(other.dtype) if is_wide else self.itself

    def _combined(self, name: str, other: Any, *, is_mirrored: bool) -> Any:
        function = _OPERATORS[name]
        if isinstance(other, Tensor):
            mine = self.for_torch(function, (self, other))
            return function(other, mine) if is_mirrored else function(mine, other)
        is_input = type(other) is NumberInput
        if not is_input and not is_number(other):
            asked = getattr(super(), f"__{'r' if is_mirrored else ''}{name}__")
            return asked(other)
        number = other.value if is_input else other
        values = (number, self.value) if is_mirrored else (self.value, number)
        value = function(*values)
        if not is_number(value):
            return value
        tensors = [self._as(type(value)), other._as(type(value)) if is_input else number]
        if type(value) is float and not is_input:
            tensors[1] = float(number)
        return NumberInput.of(
            function(*(reversed(tensors) if is_mirrored else tensors)), self.queries
        )

    def _as(self, kind: type) -> Tensor:
        return self.tensor.to(DTYPES[kind])

    def __neg__(self) -> Any:
        return NumberInput.of(-self.tensor, self.queries)


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
