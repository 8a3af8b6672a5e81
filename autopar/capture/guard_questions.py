"""Guard questions: what code asks of a number, as data that can be asked again of another.

>>> question = GuardQuestion("__truediv__", (0,))
>>> answer_of(lambda: question(1.5))
Raised(kind=<class 'ZeroDivisionError'>)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.capture.number_formulas import class_of_number

_KINDS: dict[str, Callable[[Any], Any]] = {
    **{"bool": bool, "int": int, "float": float, "index": operator.index},
    "class of number": class_of_number,
}
_COMPARED = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_MADE = (  # with others, on either side
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "__divmod__": divmod,
    **{name: getattr(operator, name) for name in _COMPARED},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in _MADE if name != "divmod"},
}
MIRRORED = {f"__r{name}__": f"__{name}__" for name in _MADE}


@dataclass(frozen=True)
class GuardQuestion:
    """Asks a number what it is as a `kind` (bool, int, ...), or what a method of it gives."""

    kind: str
    others: tuple[Any, ...] = ()

    def __call__(self, value: Any) -> Any:
        if self.kind in _KINDS:
            return _KINDS[self.kind](value)
        if len(self.others) == 1 and self.kind in OF_TWO:
            return OF_TWO[self.kind](value, *self.others)
        if len(self.others) == 1 and self.kind in MIRRORED:
            return OF_TWO[MIRRORED[self.kind]](*self.others, value)
        return getattr(value, self.kind)(*self.others)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells it from other questions: 0.0 is not -0.0, nor True 1."""
        return self.kind, *((type(other), repr(other)) for other in self.others)


@dataclass(frozen=True)
class Raised:
    """The answer of a question that raises."""

    kind: type[Exception]

    def __str__(self) -> str:
        return self.kind.__name__


def answer_of(ask: Callable[[], Any]) -> Any:
    """Return an answer, or that it raises."""
    try:
        return ask()
    except Exception as error:
        return Raised(type(error))
