"""Named: what functions can read and change besides what they are given, as far as names lead.

That is what stands in the globals of their files, in closures and in classes; and what functions
that are named there name in turn. Of torch and Python itself nothing is.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from autopar.capture.attributes import held, kept
from autopar.capture.source import is_users

_Names = frozenset[str]
_Reached = tuple[str, Any, _Names]  # a name, what it names, and the attributes asked around it
_NONE = _Names()
_Cached = type(cache(lambda: None))


def named_by(*roots: Any, but: Callable[[Any], bool] = lambda value: False) -> dict[str, list[Any]]:
    """Of each value that functions, classes or a frame name, `but` some, what tells whether it, or
    what it holds, changes."""
    found = defaultdict[str, list[Any]](list)
    waiting = deque[_Reached](("", root, _NONE) for root in roots)
    seen = set[Any]()
    while waiting:
        name, value, names = waiting.popleft()
        key = id(value), names if isinstance(value, ModuleType) else name
        if key in seen or but(value):
            continue
        seen.add(key)
        leads = _leads_to(value, names)
        if leads is None:
            found[name] += [value, *_told(value)]
            leads = iter([(name, type(value), names)])
        waiting.extend(leads)
    return found


def _told(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return kept(value)
    is_held = isinstance(value, Collection | Iterator | SimpleNamespace) or _is_users(type(value))
    return held(value) if is_held else []


def _leads_to(value: Any, names: _Names) -> Iterator[_Reached] | None:
    """What is reached by way of a function, class, module or frame; None by way of others."""
    if isinstance(value, FunctionType):
        return _of_function(value) if is_users(value.__code__.co_filename) else iter(())
    if isinstance(value, type):
        return _of_class(value) if _is_users(value) else iter(())
    if isinstance(value, ModuleType):
        is_own = is_users(getattr(value, "__file__", None) or "<")
        return _among(vars(value), names, names) if is_own else iter(())
    if isinstance(value, FrameType):
        return _of_frame(value)
    inner: tuple[Any, ...] | None = None
    if isinstance(value, MethodType):
        inner = value.__func__, value.__self__
    elif isinstance(value, partial):
        inner = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, _Cached):
        inner = (value.__wrapped__,)
    return None if inner is None else (("", one, names) for one in inner)


def _of_frame(frame: FrameType) -> Iterator[_Reached]:
    named, asked = _names_of(frame.f_code)
    yield from _among(frame.f_globals, named, asked)
    yield from _among(frame.f_locals, _Names(frame.f_locals), asked)


def _of_function(function: FunctionType) -> Iterator[_Reached]:
    named, asked = _names_of(function.__code__)
    yield from _among(function.__globals__, named, asked)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if cell != type(cell)():  # one that is empty
            yield name, cell.cell_contents, asked
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    for value in (*defaults, *vars(function).values()):
        yield function.__name__, value, asked


def _of_class(kind: type) -> Iterator[_Reached]:
    yield from (("", base, _NONE) for base in kind.__bases__)
    for name, value in [*vars(kind).items()]:
        for one in _functions(value):
            is_called = not name.startswith("__") or isinstance(one, FunctionType)
            if is_called and name != "__init__":
                yield name, one, _NONE


def _functions(value: Any) -> tuple[Any, ...]:
    """Those of a property, or of a method of a class; of others, themselves."""
    if isinstance(value, property):
        return value.fget, value.fset
    return (value.__func__,) if isinstance(value, staticmethod | classmethod) else (value,)


def _among(space: Mapping[str, Any], names: _Names, asked: _Names) -> Iterator[_Reached]:
    return ((name, space[name], asked) for name in sorted(names) if name in space)


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
