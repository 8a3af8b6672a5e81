"""Caches: what forward keeps around the model for later calls, which holds no values while it is
followed.

    @lru_cache
    def places(count):
        return torch.arange(count)

Afterwards it is made anew: in the files of the model's classes, and others of which lines have run,
caches of functions that hold traced tensors are cleared, and globals, attributes of classes, dicts
and lists hold what they held.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from autopar.capture.fake import FakeTensor, FakeTensorMode
from autopar.capture.source import is_users

_CACHED = type(cache(lambda: None))
_INSIDE = (dict, list, tuple, "_lru_list_elem", "_HashedSeq")  # of such a cache
_CONTAINERS = dict | list | deque
Known = dict[int, tuple[Any, Any]]  # what a file, class or container held, by its id


@contextmanager
def emptied_afterwards(
    model: nn.Module, files: Collection[str], own: FakeTensorMode | None
) -> Iterator[None]:
    """Around forward, where it is followed. `files`: those of which lines have run then; `own`: the
    mode of tensors without values that are the caller's."""
    spaces, known = _spaces(model), Known()
    for space in spaces:
        _note(space, known)
    try:
        yield
    finally:
        for holder, before in known.values():
            _empty(holder, before, known, own)
        for module in [*sys.modules.values()]:
            if getattr(module, "__file__", None) in files and id(module) not in known:
                _empty(module, None, known, own)


def _spaces(model: nn.Module) -> list[Any]:
    """The classes of a model, and their files."""
    kinds = {base: None for module in model.modules() for base in type(module).__mro__}
    files = {sys.modules.get(kind.__module__): None for kind in kinds}
    return [space for space in (*kinds, *files) if _is_users(space)]


def _is_users(space: Any) -> bool:
    module = sys.modules.get(space.__module__) if isinstance(space, type) else space
    return is_users(getattr(module, "__file__", None) or "<")


def _note(space: Any, known: Known) -> None:
    """Note what a file or class holds, and what containers in it do."""
    waiting = [space]
    while waiting:
        holder = waiting.pop()
        if id(holder) not in known:
            known[id(holder)] = holder, _held(holder)
            waiting.extend(one for one in _values(holder) if isinstance(one, _CONTAINERS))


def _held(holder: Any) -> Any:
    """By name, key or number."""
    if isinstance(holder, list | deque):
        return dict(enumerate(holder))
    if isinstance(holder, dict):
        return dict(dict.items(holder))
    return {name: one for name, one in vars(holder).items() if not name.startswith("__")}


def _values(holder: Any) -> Iterable[Any]:
    found: dict[Any, Any] = _held(holder)
    return found.values()


def _empty(
    holder: Any, before: dict[Any, Any] | None, known: Known, own: FakeTensorMode | None
) -> None:
    """Let a file, class or container hold what it held before, in place of what is traced."""
    for name, value in _held(holder).items():
        for cached in _cached(value):
            if any(_is_traced(one, own) for one in _kept(cached)):
                cached.cache_clear()
        if id(value) in known or not _is_traced(value, own):
            continue
        if before is None and isinstance(value, _CONTAINERS) and isinstance(holder, ModuleType):
            _empty(value, {}, known, own)
        elif isinstance(holder, list | deque):
            holder.clear()
            holder.extend((before or {}).values())
            return
        elif isinstance(holder, dict):
            if before is not None and name in before:
                holder[name] = before[name]
            else:
                del holder[name]
        elif before is None or name in before:
            setattr(holder, name, (before or {}).get(name))
        else:
            delattr(holder, name)


def _is_traced(value: Any, own: FakeTensorMode | None) -> bool:
    """Whether tensors of a capture are among what a value is, or holds."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, FakeTensor) and one.fake_mode is not own:
            return True
        if isinstance(one, list | tuple | dict | deque) and id(one) not in seen:
            seen.add(id(one))
            waiting.extend(dict.values(one) if isinstance(one, dict) else one)
    return False


def _cached(value: Any) -> Iterator[Any]:
    """The functions with caches that a function is, or is made around."""
    waiting, seen = [getattr(value, "__func__", value)], set[int]()  # of a static method
    while waiting:
        one = waiting.pop()
        if isinstance(one, _CACHED):
            yield one
        elif isinstance(one, FunctionType) and id(one) not in seen:
            seen.add(id(one))
            cells = (cell for cell in one.__closure__ or () if cell != CellType())
            waiting.extend(cell.cell_contents for cell in cells)


def _kept(cached: Any) -> Iterator[Any]:
    """The traced tensors that the cache of a function holds."""
    waiting, seen = [cached], set[int]()
    while waiting:
        for one in gc.get_referents(waiting.pop()):
            if isinstance(one, FakeTensor):
                yield one
            elif id(one) not in seen and {type(one), type(one).__name__} & {*_INSIDE}:
                seen.add(id(one))
                waiting.append(one)
