"""What modules keep besides parameters and buffers, and what stands in that: as it was, to be put
back, and to be told from what it is later.

    before = ModuleState(model)
    model(x)
    before.changed(ModuleState(model))    # ["blocks.0.calls", "history[3]"]
    before.put_back()
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from types import (
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, cast

import numpy as np
from torch import Tensor, fx, nn

from autopar.capture.attributes import PLAIN

_OF_TORCH = vars(nn.Module()).keys() - {"training"}  # what every module keeps
_LEAVES = (*PLAIN, Tensor, Enum, fx.Node, fx.Graph, type, FunctionType, ModuleType)
_DESCRIPTORS = GetSetDescriptorType, MemberDescriptorType
_MANY = 1000  # entries that are compared all together, where they are plain
# Modules whose objects keep nothing of a model.
_KNOWN = sys.stdlib_module_names - {"collections"} | {"torch", "autopar"}


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
                elif isinstance(value, np.ndarray | bytearray):
                    value = (bytes(value),)
                self.values[name] = value

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that stand somewhere."""
        return {path: value for path, value in self.values.items() if isinstance(value, Tensor)}

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
            if isinstance(holder, dict):
                kind = OrderedDict if isinstance(holder, OrderedDict) else dict
                kind.clear(holder)
                kind.update(holder, held)
            elif isinstance(holder, list | deque):
                holder.clear()
                holder.extend(held.values())
            elif isinstance(holder, set):
                holder.clear()
                holder.update(held)
            else:
                for name in now.keys() - held.keys():
                    object.__delattr__(holder, name)
                for name, value in held.items():
                    object.__setattr__(holder, name, value)


def is_known(value: Any) -> bool:
    """Whether it is of a class of Python, torch or this package."""
    return type(value).__module__.partition(".")[0] in _KNOWN


def _holds(value: Any) -> bool:
    """Whether other values stand in it."""
    if isinstance(value, _LEAVES):
        return False
    if isinstance(value, dict | list | tuple | set | deque | nn.Module | SimpleNamespace):
        return True
    return not is_known(value) and (_space(value) is not None or bool(_slots(value)))


def _copied(holder: Any) -> dict[Any, Any]:
    """What it holds now, by name, key or place; without asking it."""
    if isinstance(holder, dict):
        return dict(dict.items(holder))
    if isinstance(holder, list | tuple | deque):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return dict.fromkeys(holder)
    return (_space(holder) or {}) | _slots(holder)


def _space(value: Any) -> dict[str, Any] | None:
    """Its attributes, whatever its class answers."""
    for kind in type(value).__mro__:
        if isinstance(own := vars(kind).get("__dict__"), _DESCRIPTORS):
            return cast(dict[str, Any], own.__get__(value))
    return None


def _slots(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and not name.endswith("__"):
                with suppress(AttributeError):  # not set
                    found[name] = member.__get__(value)
    return found


def _items(holder: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What it holds, by its path."""
    if isinstance(holder, set):
        yield f"{path}, its members", frozenset(holder)
        return
    is_indexed, held = isinstance(holder, dict | list | tuple | deque), _copied(holder)
    if is_indexed and len(held) > _MANY and {*map(type, held.values())} <= {*PLAIN}:
        yield f"{path}[...]", tuple(held.items())
        return
    of_torch = _OF_TORCH if isinstance(holder, nn.Module) else ()
    if isinstance(holder, nn.Module):  # hidden.py: what is there is asked of nobody
        parameters: dict[str, Any] = dict(dict.items(holder._parameters))
        held |= parameters | dict(dict.items(holder._buffers))
    for key, value in held.items():
        if is_indexed:
            yield f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[{id(key)}]", value
        elif key not in of_torch:
            yield f"{path}.{key}" if path else key, value


def _is_same(value: Any, other: Any) -> bool:
    if value is other or type(value) is not type(other):
        return value is other
    if isinstance(value, float) and value != value:
        return other != other
    return isinstance(value, (*PLAIN, tuple, frozenset)) and bool(value == other)
