"""Drawn elsewhere: random numbers of Python or numpy in forward, which no program draws again.

A program is what one run of forward did, and whatever it draws so would stand in the program for
ever: it is refused. Not where the number is only asked whether it lies outside of its range (`if
random.random() < self.layerdrop` with a layerdrop of 0), nor after a seed that forward sets itself.
"""

from __future__ import annotations

import linecache
import pickle
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy

from autopar.base.user_code import is_users_frame
from autopar.capture.hooks import replaced
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller

_STATES = ("getstate", "setstate", "get_state", "set_state")
# What is at least 0, and below 1.
_FRACTIONS = ("random", "rand", "random_sample", "ranf")
_SETTING = re.compile(r"\bself\.config(?:\.|, ?[\"'])(\w+)|< ?self\.(\w+)")
_BEGINS = str(Path(__file__).with_name("export.py"))  # what forward is called from


@contextmanager
def draws_elsewhere_refused() -> Iterator[None]:
    """While forward runs, refuse what it draws by Python or numpy."""
    seeded, beside = list[object](), list[object]()  # `beside`: that other threads draw of
    before = random.getstate(), _numbers()
    with ExitStack() as stack:
        for module in (random, numpy.random):
            for name, function in _drawing(module):
                call = _refuse(module.__name__, name, function, seeded)
                others = _noted(function, module, beside)
                stack.enter_context(replaced(module, name, call, others))
        yield
    known = [*seeded, *beside]
    is_numpy = before[1] != _numbers() and numpy.random not in known
    if is_numpy or (before[0] != random.getstate() and random not in known):
        name = "numpy.random" if is_numpy else "random"
        raise refused(f"a function of {name}, imported by its own name", (), None)


def _noted(plain: Callable[..., Any], owner: object, drawn: list[object]) -> Callable[..., Any]:
    """What a thread beside draws by, which `drawn` then tells."""

    def call(*args: Any, **kwargs: Any) -> Any:
        drawn.append(owner)
        return plain(*args, **kwargs)

    return call


def _numbers() -> bytes:
    """The state of numpy's generator, to be compared."""
    return pickle.dumps(numpy.random.get_state())


def _drawing(module: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The functions of the generator that a module holds."""
    owners = (random.Random, numpy.random.RandomState)
    found = [(name, getattr(module, name)) for name in dir(module) if not name.startswith("_")]
    return [
        (name, function)
        for name, function in found
        if name == "seed"
        or (isinstance(getattr(function, "__self__", None), owners) and name not in _STATES)
    ]


def _refuse(
    module: str, name: str, plain: Callable[..., Any], seeded: list[object]
) -> Callable[..., Any]:
    owner = sys.modules[module]

    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not is_users_frame(frame):
            return plain(*args, **kwargs)
        if name == "seed" and (args or kwargs):
            seeded.append(owner)
        if name == "seed" or owner in seeded:
            return plain(*args, **kwargs)
        is_fraction = name in _FRACTIONS and not (args or kwargs)
        if is_fraction or (name == "uniform" and [*args, *kwargs.values()] in ([0, 1], [])):
            return _Fraction(f"{module}.{name}")
        raise refused(f"{module}.{name}", _settings(frame), caller())

    return call


class _Fraction:
    """A number from 0 to 1, of which nothing else is known."""

    def __init__(self, drawn: str) -> None:
        self._drawn = drawn

    def __lt__(self, other: Any) -> bool:
        return False if _is_number(other) and other <= 0 else self._refuse()

    def __gt__(self, other: Any) -> bool:
        return False if _is_number(other) and other >= 1 else self._refuse()

    def __ge__(self, other: Any) -> bool:
        return True if _is_number(other) and other <= 0 else self._refuse()

    def __le__(self, other: Any) -> bool:
        return True if _is_number(other) and other >= 1 else self._refuse()

    def _refuse(self, *_: Any) -> Any:
        frame = next(
            frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if is_users_frame(frame)
        )
        raise refused(self._drawn, _settings(frame), caller())


_OPERATIONS = "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow"
_CASTS = "float int bool index round neg abs eq ne hash str format array torch_function getattr"
for _name in (*_OPERATIONS.split(), *_CASTS.split()):
    setattr(_Fraction, f"__{_name}__", _Fraction._refuse)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _settings(frame: FrameType | None) -> tuple[str, ...]:
    """What of a configuration the nearest function that reads one has asked before this line."""
    while frame is not None and frame.f_code.co_filename != _BEGINS:
        code = frame.f_code
        if is_users_frame(frame):
            lines = [
                linecache.getline(code.co_filename, number)
                for number in range(code.co_firstlineno, frame.f_lineno + 1)
            ]
            asked = [line for line in lines if re.search(r"\b(if|and|or)\b|<", line)]
            found = [one or other for line in asked for one, other in _SETTING.findall(line)]
            if found:
                return tuple(dict.fromkeys(found))
        frame = frame.f_back
    return ()


def refused(got: str, settings: tuple[str, ...], source: str | None) -> InvalidInput:
    off = f"set {' or '.join(settings)} so that nothing is drawn here; or " if settings else ""
    return InvalidInput(
        "what a step draws at random is drawn by torch",
        got=f"{got} in forward, whose numbers would be the same in every step",
        remedy=f"{off}draw by torch, or outside of forward, and hand the numbers over as an input",
        source=source,
    )
