"""What modules keep besides parameters and buffers, and what stands in that: as it was, to be put
back, and to be told from what it is later.

    before = ModuleState(model)
    model(x)
    before.changed(ModuleState(model))    # ["blocks.0.calls", "history[3]"]
    before.put_back()
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from autopar.capture.object_contents import PLAIN, attributes_of, is_a, items_of
from autopar.user_code import is_users_class

_OF_TORCH = vars(nn.Module()).keys() - {"training"}  # what every module keeps
_LEAVES = (*PLAIN, Tensor, Enum, fx.Node, fx.Graph, type, FunctionType, ModuleType)
_HOLDERS = (dict, list, tuple, set, deque, nn.Module, SimpleNamespace, UserDict, UserList, ChainMap)
_MANY = 1000  # entries that are compared all together, where they are plain


class ModuleState:
    """Of a model, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Any] = {}  # by path
        self._held: dict[int, tuple[Any, Any]] = {}  # what holds values, and all that it held
        self.values |= model.named_modules()
        waiting: list[tuple[Any, str]] = [(one, path) for path, one in self.values.items()][::-1]
        while waiting:
            holder, path = waiting.pop()
            if id(holder) in self._held:
                continue
            self._held[id(holder)] = holder, _copied(holder)
            for name, value in _items(holder, path):
                if not name.endswith("[...]") and _holds(value):
                    waiting.append((value, name))
                    value = type(value)
                elif is_a(value, np.ndarray, bytearray):
                    value = (bytes(value),)
                self.values[name] = value

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that stand somewhere."""
        return {path: value for path, value in self.values.items() if is_a(value, Tensor)}

    def changed(self, later: ModuleState) -> list[str]:
        """The paths of what is another value later, or was not there."""
        missing = object()
        return [
            path
            for path, value in later.values.items()
            if not _is_same(self.values.get(path, missing), value)
        ]

    def put_back(self) -> None:
        """Everything holds again what it held."""
        for holder, held in self._held.values():
            now = _copied(holder)
            if now.keys() == held.keys() and all(now[key] is held[key] for key in held):
                continue
            if is_a(holder, dict):
                kind = OrderedDict if is_a(holder, OrderedDict) else dict
                kind.clear(holder)
                kind.update(holder, held)
            elif is_a(holder, list, deque):
                sequence: Any = list if is_a(holder, list) else deque
                sequence.clear(holder)
                sequence.extend(holder, held.values())
            elif is_a(holder, set):
                set.clear(holder)
                set.update(holder, held)
            else:
                for name in now.keys() - held.keys():
                    object.__delattr__(holder, name)
                for name, value in held.items():
                    object.__setattr__(holder, name, value)


def is_known(value: Any) -> bool:
    """Whether it is of a class of Python, torch or this package."""
    return not is_users_class(type(value))


def _holds(value: Any) -> bool:
    """Whether other values stand in it."""
    if is_a(value, *_LEAVES):
        return False
    return is_a(value, *_HOLDERS) or (not is_known(value) and bool(attributes_of(value)))


def _copied(holder: Any) -> dict[Any, Any]:
    """What it holds now, by name, key or place; without asking it."""
    items = items_of(holder)
    return attributes_of(holder) if items is None else items


def _items(holder: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What it holds, by its path."""
    if is_a(holder, set):
        yield f"{path}, its members", frozenset(set.copy(holder))
        return
    is_indexed, held = items_of(holder) is not None, _copied(holder)
    if is_indexed and len(held) > _MANY and {*map(type, held.values())} <= {*PLAIN}:
        yield f"{path}[...]", tuple(held.items())
        return
    of_torch = _OF_TORCH if is_a(holder, nn.Module) else ()
    if is_a(holder, nn.Module):  # hidden.py: what is there is asked of nobody
        held |= (items_of(held["_parameters"]) or {}) | (items_of(held["_buffers"]) or {})
    for key, value in held.items():
        if is_indexed:
            yield f"{path}[{key!r}]" if type(key) in PLAIN else f"{path}[{id(key)}]", value
        elif key not in of_torch:
            yield f"{path}.{key}" if path else key, value


def _is_same(value: Any, other: Any) -> bool:
    if value is other or type(value) is not type(other):
        return value is other
    if is_a(value, float) and value != value:
        return other != other
    return is_a(value, *PLAIN, tuple, frozenset) and bool(value == other)
