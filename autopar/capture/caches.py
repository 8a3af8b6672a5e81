"""Caches: what forward keeps around the model for later calls, which holds no values while it is
followed.

    @lru_cache
    def places(count):
        return torch.arange(count)

Afterwards it is made anew: in the globals of the model's classes, and of other code that has run,
caches of functions that hold traced tensors are cleared, and globals, attributes of classes, dicts
and lists hold what they held.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from autopar.base.user_code import is_users_class, is_users_space, module_name
from autopar.capture.fake import FakeTensor, FakeTensorMode
from autopar.capture.object_contents import class_space_of, is_a, items_of, space_of

_CACHED = type(cache(lambda: None))
_INSIDE = (dict, list, tuple, "_lru_list_elem", "_HashedSeq")  # of such a cache
_CONTAINERS = (dict, list, deque)
Known = dict[int, tuple[Any, Any]]  # what globals, a class or a container held, by its id


@contextmanager
def emptied_afterwards(
    model: nn.Module, spaces: Mapping[int, dict[str, Any]], own: FakeTensorMode | None
) -> Iterator[None]:
    """Around forward, where it is followed. `spaces`: the globals of the code that has run then, by
    identity; `own`: the mode of tensors without values that are the caller's."""
    known = Known()
    for holder in _holders(model):
        _note(holder, known)
    try:
        yield
    finally:
        for holder, before in known.values():
            _empty(holder, before, known, own)
        for holder in spaces.values():
            if id(holder) not in known:
                _empty(holder, None, known, own)


def _holders(model: nn.Module) -> Iterator[Any]:
    """The user's classes of a model, and the globals of their code."""
    kinds = {base: None for module in model.modules() for base in type(module).__mro__}
    for kind in kinds:
        if is_users_class(kind):
            yield kind
            functions = (one for one in class_space_of(kind).values() if is_a(one, FunctionType))
            spaces = [one.__globals__ for one in functions]
            spaces.append(space_of(sys.modules.get(module_name(kind))) or {})
            yield from filter(is_users_space, spaces)


def _note(holder: Any, known: Known) -> None:
    """Note what globals or a class hold, and what containers in them do."""
    waiting = [holder]
    while waiting:
        holder = waiting.pop()
        if id(holder) not in known:
            known[id(holder)] = holder, (held := _held(holder))
            waiting.extend(one for one in held.values() if is_a(one, *_CONTAINERS))


def _held(holder: Any) -> dict[Any, Any]:
    """By name, key or number."""
    items = items_of(holder)
    if items is not None:
        return items
    return {name: v for name, v in class_space_of(holder).items() if not name.startswith("__")}


def _empty(
    holder: Any, before: dict[Any, Any] | None, known: Known, own: FakeTensorMode | None
) -> None:
    """Let globals, a class or a container hold what it held before, in place of what is traced.
    `before` is None for globals that nobody has looked at."""
    for name, value in _held(holder).items():
        for cached in _cached(value):
            if any(_is_traced(one, own) for one in _kept(cached)):
                cached.cache_clear()
        if id(value) in known or not _is_traced(value, own):
            continue
        if before is None:
            if is_a(value, *_CONTAINERS):
                _empty(value, {}, known, own)
            else:
                holder[name] = None
        elif is_a(holder, list, deque):
            holder.clear()
            holder.extend(before.values())
            return
        elif is_a(holder, type):
            if name in before:
                type.__setattr__(holder, name, before[name])
            else:
                type.__delattr__(holder, name)
        elif name in before:
            holder[name] = before[name]
        else:
            del holder[name]


def _is_traced(value: Any, own: FakeTensorMode | None) -> bool:
    """Whether tensors of a capture are among what a value is, or holds."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if is_a(one, FakeTensor) and one.fake_mode is not own:
            return True
        if is_a(one, tuple, *_CONTAINERS) and id(one) not in seen:
            seen.add(id(one))
            waiting.extend((items_of(one) or {}).values())
    return False


def _cached(value: Any) -> Iterator[Any]:
    """The functions with caches that a function is, or is made around."""
    is_bound = is_a(value, MethodType, staticmethod, classmethod)
    waiting, seen = [value.__func__ if is_bound else value], set[int]()
    while waiting:
        one = waiting.pop()
        if is_a(one, _CACHED):
            yield one
        elif is_a(one, FunctionType) and id(one) not in seen:
            seen.add(id(one))
            cells = (cell for cell in one.__closure__ or () if cell != CellType())
            waiting.extend(cell.cell_contents for cell in cells)


def _kept(cached: Any) -> Iterator[Any]:
    """The traced tensors that the cache of a function holds."""
    waiting, seen = [cached], set[int]()
    while waiting:
        for one in gc.get_referents(waiting.pop()):
            if is_a(one, FakeTensor):
                yield one
            elif id(one) not in seen and (type(one) in _INSIDE or type(one).__name__ in _INSIDE):
                seen.add(id(one))
                waiting.append(one)
