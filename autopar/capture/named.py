"""Named: what functions can read and change besides what they are given, as far as names lead.

That is what stands in the globals of their files, in closures and in classes; and what functions
that are named there name in turn. Of torch and Python itself nothing is.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import nn

from autopar.capture.attributes import held, kept
from autopar.capture.source import is_users

_Names = frozenset[str]
_NONE = _Names()
_ABSENT = object()
_Cached = type(cache(lambda: None))


@dataclass(frozen=True)
class _Place:
    """Where a value has a name: in a mapping, or in a cell of a closure."""

    name: str
    space: Any
    asked: _Names = _NONE  # what is asked of others around it

    @property
    def value(self) -> Any:
        if isinstance(self.space, CellType):
            return self.space.cell_contents if self.space != CellType() else _ABSENT
        return self.space.get(self.name, _ABSENT)


class Named:
    """All that functions, classes or a frame name, `but` some."""

    def __init__(self, *roots: Any, but: Callable[[Any], bool] = lambda value: False) -> None:
        self._but, self._places = but, list[_Place]()
        waiting, seen = deque(_Place("", {"": root}) for root in roots), set[Any]()
        while waiting:
            place = waiting.popleft()
            value = place.value
            key = id(value), place.asked if isinstance(value, ModuleType) else place.name
            if key in seen or but(value):
                continue
            seen.add(key)
            self._places.append(place)
            leads = _leads_to(value, place.asked)
            waiting.extend([_Place("", {"": type(value)})] if leads is None else leads)

    def now(self) -> dict[str, list[Any]]:
        """Of each value, by name, what tells whether it, or what it holds, changes."""
        found = defaultdict[str, list[Any]](list)
        for place in self._places:
            value = place.value
            if not self._but(value):
                found[place.name] += [value, *_told(value)]
        return found


# What is looked into, beside objects of the user's own classes.
_HELD = Collection | Iterator | SimpleNamespace | threading.local | ContextVar


def _told(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return kept(value)
    if isinstance(value, FunctionType | type | ModuleType):
        return []
    is_held = isinstance(value, _HELD) or _is_users(type(value))
    return held(value) if is_held else []


def _leads_to(value: Any, asked: _Names) -> Iterable[_Place] | None:
    """What is reached by way of a function, class, module or frame; None by way of others."""
    if isinstance(value, FunctionType):
        return _of_function(value) if is_users(value.__code__.co_filename) else ()
    if isinstance(value, type):
        return _of_class(value) if _is_users(value) else ()
    if isinstance(value, ModuleType):
        is_own = is_users(getattr(value, "__file__", None) or "<")
        return _among(vars(value), asked, asked) if is_own else ()
    if isinstance(value, FrameType):
        named, own = _names_of(value.f_code)
        variables = _among(value.f_locals, _Names(value.f_locals), own)
        return [*_among(value.f_globals, named, own), *variables]
    inner: tuple[Any, ...] | None = None
    if isinstance(value, MethodType):
        inner = value.__func__, value.__self__
    elif isinstance(value, partial):
        inner = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, _Cached):
        inner = (value.__wrapped__,)
    return None if inner is None else [_Place("", {"": one}, asked) for one in inner]


def _of_function(function: FunctionType) -> Iterator[_Place]:
    named, asked = _names_of(function.__code__)
    yield from _among(function.__globals__, named, asked)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield _Place(name, cell, asked)
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from (_Place(function.__name__, {function.__name__: one}, asked) for one in defaults)
    yield from _among(vars(function), _Names(vars(function)), asked)


def _of_class(kind: type) -> Iterator[_Place]:
    yield from (_Place("", {"": base}) for base in kind.__bases__)
    for name, value in [*vars(kind).items()]:
        inner = _functions(value)
        if name == "__init__" or (name.startswith("__") and not isinstance(value, FunctionType)):
            continue
        same = len(inner) == 1 and inner[0] is value
        yield from [_Place(name, vars(kind))] if same else (_Place("", {"": f}) for f in inner)


def _functions(value: Any) -> tuple[Any, ...]:
    """Those of a property, or of a method of a class; of others, themselves."""
    if isinstance(value, property):
        return value.fget, value.fset
    return (value.__func__,) if isinstance(value, staticmethod | classmethod) else (value,)


def _among(space: Mapping[str, Any], names: _Names, asked: _Names) -> Iterator[_Place]:
    return (_Place(name, space, asked) for name in sorted(names) if name in space)


@cache
def _names_of(code: CodeType) -> tuple[_Names, _Names]:
    """The globals that code reads or sets, and all that it asks others for; with that of functions
    in it."""
    named = {one.argval for one in dis.get_instructions(code) if "_GLOBAL" in one.opname}
    asked = {*code.co_names}
    for one in code.co_consts:
        if isinstance(one, CodeType):
            named |= _names_of(one)[0]
            asked |= _names_of(one)[1]
    return _Names(named), _Names(asked)


def _is_users(kind: type) -> bool:
    """Whether a class is of the user's code, which may have no file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
    return kind.__module__ == "__main__" or is_users(file)
