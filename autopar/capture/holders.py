"""Holders: where values stand that forward may change, read and written without asking the object.

Each kind of holder says what stands in it by key, what has changed since it was noted, and how a
value is put there: attributes of modules and other objects, entries of containers, globals of a
file, attributes of a class, and what a closure names.

>>> log = Sequence([1], "log", None)
>>> log.value.append(2)
>>> [(one.name, one.kind, one.value) for one in log.changes()]
[('log', 'grown', [2])]
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from autopar.base.user_code import is_users_class
from autopar.capture.object_contents import (
    ABSENT,
    PLAIN,
    attributes_of,
    class_space_of,
    is_a,
    is_iterator,
    items_of,
    reader_of,
    space_of,
)
from autopar.errors import InvalidInput

Path = tuple[Any, ...]  # of keys, from the model
Place = tuple[Path | int, Any]  # a holder and a key
VALUES = (*PLAIN, complex, bytes, range, slice)  # that are equal if they say the same
_OPAQUE = (np.ndarray, bytearray, array)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
TENSORS = ("_parameters", "_buffers")
# What torch keeps in every module; `forward` stands there where somebody has replaced the method.
_OF_TORCH = (vars(nn.Module()).keys() - {"training"}) | {"forward"}
MODEL_STATE = "_model_state"  # in a parallel module: what of the model forward may change


@dataclass(frozen=True)
class Change:
    """One thing that stands elsewhere than it stood."""

    holder: Holder
    key: Any  # None: of all items of a sequence
    value: Any  # what stands there now, `ABSENT` for nothing; of what has grown, what was added
    before: Any
    kind: Literal["set", "grown", "rewritten"] = "set"

    @property
    def name(self) -> str:
        return self.holder.label(self.key)

    @property
    def place(self) -> Place:
        return self.holder.place, self.key


class Holder:
    """An object with attributes."""

    def __init__(self, value: Any, name: str, path: Path | None) -> None:
        """`name`: what messages call it. `path`: the keys that lead to it from the model; None
        where copies of the model share it."""
        self.value, self.name, self.path = value, name, path
        self.held = self.read()

    def read(self) -> dict[Any, Any]:
        """Return what stands in it now, by key."""
        return self.of(self.value)

    def of(self, value: Any) -> dict[Any, Any]:
        """Return what stands in an object of this kind, by key."""
        return attributes_of(value)

    def label(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.name else str(key)

    @property
    def place(self) -> Path | int:
        """Return what tells it from others: copies of a model have other objects."""
        return id(self.value) if self.path is None else self.path

    def path_of(self, key: Any) -> Path | None:
        return None if self.path is None else (*self.path, key)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed since it was noted."""
        now = self.read()
        for key in (*now, *(key for key in self.held if key not in now)):
            value, before = now.get(key, ABSENT), self.held.get(key, ABSENT)
            if not is_same(before, value):
                yield Change(self, key, value, before)

    def put_back(self, changes: Iterable[Change]) -> None:
        """Take back some of the changes."""
        for change in changes:
            self.write(self.value, change.key, change.before)

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        """Put a value into the holder, or into what stands in its place elsewhere."""
        space = space_of(target)
        if space is not None and (key in space or key not in attributes_of(target)):
            _write_entry(space, key, value)
        elif value is ABSENT:
            object.__delattr__(target, key)
        else:  # in a slot
            object.__setattr__(target, key, value)

    def at(self, root: nn.Module) -> Any:
        """Return what stands in its place in `root`, a parallel module or the model."""
        if self.path is None:
            return self.value
        found: Any = root
        try:
            for key in self.path:
                found = _step(found, key)
        except (LookupError, AttributeError) as error:
            raise InvalidInput(
                "what forward changes in Python is there when the model is parallelized",
                got=f"{self.name}, which is not",
                remedy="make it in __init__()",
            ) from error
        return found


class Module(Holder):
    """A module without its tensors and submodules, which are holders of their own."""

    def of(self, value: Any) -> dict[Any, Any]:
        return {key: one for key, one in attributes_of(value).items() if key not in _OF_TORCH}

    def parts(self) -> Iterator[Parts]:
        """Yield what torch keeps in it of what forward may change."""
        space: Any = space_of(self.value)
        for key in ("_modules", *TENSORS, *HOOKS):
            name = f"a forward hook of {self.name or 'the model'}" if key in HOOKS else self.name
            yield Parts(space[key], name, self.path_of(key), key, self.value)


class Entries(Holder):
    """A dict."""

    def of(self, value: Any) -> dict[Any, Any]:
        return items_of(value) or {}

    def changes(self) -> Iterator[Change]:
        yield from super().changes()
        if type(self) is Entries:  # in another order they are another dict
            now = self.read()
            order = [key for key in self.held if key in now]
            for key, former in zip((key for key in now if key in self.held), order):
                if key is not former and is_same(now[key], self.held[key]):
                    yield Change(self, key, now[key], self.held[key])

    def label(self, key: Any) -> str:
        return f"{self.name}[{key!r}]" if is_a(key, *VALUES, tuple) else f"{self.name}[...]"

    def put_back(self, changes: Iterable[Change]) -> None:
        super().put_back(changes)
        if self.read().keys() == self.held.keys():  # in the order in which they stood
            kind = OrderedDict if is_a(self.value, OrderedDict) else dict
            kind.clear(self.value)
            kind.update(self.value, self.held)

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        _write_entry(target, key, value)


class Parts(Entries):
    """The submodules, parameters, buffers or hooks of a module."""

    def __init__(
        self, value: Any, name: str, path: Path | None, kind: str, owner: nn.Module
    ) -> None:
        self.kind, self.owner = kind, owner  # `kind`: the attribute in which torch keeps them
        super().__init__(value, name, path)

    label = Holder.label


class Globals(Entries):
    """Of the globals of a file those that are named."""

    def __init__(self, value: Any, name: str) -> None:
        self.names: dict[str, None] = {}
        super().__init__(value, name, None)

    def of(self, value: Any) -> dict[Any, Any]:
        return {name: value[name] for name in self.names if name in value}

    label, put_back = Holder.label, Holder.put_back


class Sequence(Holder):
    """A list, a tuple or a deque."""

    def of(self, value: Any) -> dict[Any, Any]:
        return items_of(value) or {}

    def label(self, key: Any) -> str:
        return self.name if key is None else f"{self.name}[{key}]"

    def changes(self) -> Iterator[Change]:
        before, now = [*self.held.values()], [*self.read().values()]
        if len(before) == len(now) and all(map(is_same, before, now)):
            return
        # A deque with a longest length drops its first items.
        is_full = is_a(self.value, deque) and self.value.maxlen == len(now)
        for start in range(len(before) + 1) if is_full else (0,):
            kept = before[start:]
            if len(kept) < len(now) and all(map(is_same, kept, now)):
                yield Change(self, None, now[len(kept) :], before, "grown")
                return
        yield Change(self, None, now, before, "rewritten")

    def put_back(self, changes: Iterable[Change]) -> None:
        self.write(self.value, None, [*self.held.values()], "rewritten")

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        if is_a(target, tuple):
            return
        if key is not None:
            target[key] = value
            return
        if kind == "rewritten":
            target.clear()
        target.extend(value)


class Members(Entries):
    """A set."""

    def label(self, key: Any) -> str:
        return f"{self.name}, its members"

    put_back = Holder.put_back

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        set.discard(target, key) if value is ABSENT else set.add(target, key)


class ClassSpace(Holder):
    """The attributes of a class, without its methods."""

    def of(self, value: Any) -> dict[Any, Any]:
        space = class_space_of(value).items()
        return {k: v for k, v in space if not (k.startswith("__") or is_a(v, *_METHODS))}

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        type.__delattr__(target, key) if value is ABSENT else type.__setattr__(target, key, value)


_METHODS = (FunctionType, staticmethod, classmethod, property)


class Cell(Holder):
    """What a closure names."""

    def of(self, value: Any) -> dict[Any, Any]:
        return {} if value == CellType() else {"": value.cell_contents}

    def label(self, key: Any) -> str:
        return self.name

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        if value is ABSENT:
            del target.cell_contents
        else:
            target.cell_contents = value


class Opaque(Holder):
    """An object whose contents are not Python's, as an array."""

    def __init__(self, value: Any, name: str, path: Path | None) -> None:
        self._copy = value.copy() if is_a(value, np.ndarray, bytearray) else None
        super().__init__(value, name, path)

    def of(self, value: Any) -> dict[Any, Any]:
        look = reader_of(value)
        return {"": tuple(look())} if look is not None else {}

    def label(self, key: Any) -> str:
        return self.name

    def put_back(self, changes: Iterable[Change]) -> None:
        if self._copy is not None:
            self.value[... if is_a(self.value, np.ndarray) else slice(None)] = self._copy

    def write(self, target: Any, key: Any, value: Any, kind: str = "set") -> None:
        """Nothing: what stands in it are not values of Python."""


def holder_of(value: Any, name: str, path: Path | None) -> Holder:
    """Return the holder of what stands in an object."""
    kind = next((holder for holder, kinds in _KINDS if is_a(value, *kinds)), Holder)
    if is_iterator(value):
        kind = Opaque
    return kind(value, name, path)


_KINDS: tuple[tuple[type[Holder], tuple[type, ...]], ...] = (
    (Module, (nn.Module,)),
    (Entries, (dict,)),
    (Sequence, (list, tuple, deque)),
    (Members, (set,)),
    (Cell, (CellType,)),
    (ClassSpace, (type,)),
    (Opaque, _OPAQUE),
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a value is, or that stand in it; not those of modules."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if is_a(one, Tensor):
            yield one
        elif type(one) not in VALUES and id(one) not in seen:
            seen.add(id(one))
            items = items_of(one)
            if items is not None:
                waiting += items.values()
            elif is_a(one, FunctionType, MethodType, partial):
                waiting += held_by(one)
            elif is_users_class(type(one)) and not is_a(one, nn.Module, type):
                waiting += attributes_of(one).values()


def held_by(function: Any) -> list[Any]:
    """Return what a function is made of: what it runs, and what it has been given."""
    if is_a(function, MethodType):
        return [function.__func__, function.__self__]
    if is_a(function, partial):
        return [function.func, function.args, function.keywords]
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [function.__code__, *(function.__defaults__ or ()), *cells]


def has_tensors(value: Any) -> bool:
    """Return whether tensors stand in a value."""
    return next(tensors_in(value), None) is not None


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or plain ones that are equal."""
    if one is other or type(one) is not type(other):
        return one is other
    if is_a(one, float) and one != one:
        return bool(other != other)
    if type(one) in (tuple, torch.Size):
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is frozenset:
        return all(type(member) in VALUES for member in one | other) and one == other
    return type(one) in VALUES and bool(one == other)


def attribute_at(path: Path) -> tuple[str, Any]:
    """Return of a path the module, by its name, and the attribute in which it goes on."""
    modules = list[str]()
    keys = iter(path)
    for key in keys:
        if key != "_modules" or (child := next(keys, None)) is None:
            return ".".join(modules), key
        modules.append(child)
    return ".".join(modules), None


def _write_entry(space: dict[Any, Any], key: Any, value: Any) -> None:
    dict.pop(space, key, None) if value is ABSENT else dict.__setitem__(space, key, value)


def _step(value: Any, key: Any) -> Any:
    """Return what stands in a value at a key of a path."""
    if is_a(value, nn.Module):
        space: Any = space_of(value)
        if key in (state := space.get(MODEL_STATE, {})):
            return state[key] if key in HOOKS else space.setdefault(key, state[key])
        return space[key]
    if is_a(value, MethodType, partial):
        return getattr(value, key)
    items = items_of(value)
    return attributes_of(value)[key] if items is None else items[key]
