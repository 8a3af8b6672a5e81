"""Python state: what a model, its hooks and the functions that its forward can call keep in Python.

    state = PythonState(model)
    model(x)
    [change.name for change in state.changes()]    # ["blocks.0.aux", "metrics['x']", "STEP"]
    state.put_back()

Followed are what stands in modules, the forward hooks, and, of the user's functions, the closures,
globals and classes that their code names; of an object that stands outside of the model, the
attributes that this code names. What is reached by a name that is made up while the code runs, as
in `globals()[name]`, is not seen.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch.nn.modules.module as modules
from torch import Tensor, nn

from autopar._torch.tensors import memory_of
from autopar.base.user_code import (
    class_name,
    is_users_class,
    is_users_function,
    is_users_module,
    module_name,
)
from autopar.capture.holders import (
    TENSORS,
    Cell,
    Change,
    ClassSpace,
    Globals,
    Holder,
    Module,
    Opaque,
    Parts,
    Path,
    Sequence,
    has_tensors,
    holder_of,
)
from autopar.capture.object_contents import (
    ABSENT,
    LEAVES,
    PLAIN,
    attributes_of,
    bases_of,
    class_space_of,
    is_a,
    items_of,
    space_of,
)

_SKIPPED = (*PLAIN, *LEAVES)
_OF_MODULES = "_global_forward_pre_hooks", "_global_forward_hooks"


_Found = tuple[Any, str, Path | None]  # a value, what messages call it, and its path


class PythonState:
    """The state at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[int, Holder] = {}
        self.names = set[str]()  # in the code that is followed
        self._unnamed: dict[str, list[_Found]] = defaultdict(list)  # by a name that none has so far
        self._seen = set[int]()
        self._waiting = deque[_Found]([(model, "", ())])
        self._waiting += ((getattr(modules, name), "", None) for name in _OF_MODULES)
        while self._waiting:
            self._follow(*self._waiting.popleft())

    def place_of(self, tensor: Tensor) -> tuple[Holder, str] | None:
        """Return where a tensor stands among the parameters and buffers of modules."""
        return self._places.get(id(tensor))

    @cached_property
    def _places(self) -> dict[int, tuple[Holder, str]]:
        parts = (one for one in self._holders.values() if isinstance(one, Parts))
        return {
            id(tensor): (holder, name)
            for holder in parts
            for name, tensor in holder.held.items()
            if holder.kind in TENSORS and tensor is not None
        }

    def changes(self) -> list[Change]:
        """What has changed since."""
        return [change for holder in self._holders.values() for change in holder.changes()]

    def put_back(self) -> None:
        """Let everything hold again what it held, but for parameters, buffers and switches."""
        for holder in self._holders.values():
            is_of_tensors = isinstance(holder, Parts) and holder.kind in TENSORS
            if not is_of_tensors and (changes := [c for c in holder.changes() if not is_switch(c)]):
                holder.put_back(changes)

    def holder(self, value: Any) -> Holder | None:
        """Return the holder of what stood in an object."""
        found = self._holders.get(id(value))
        return None if found is None or isinstance(found, Globals) else found

    def module(self, identity: int) -> Holder | None:
        """Return the holder of a module's attributes, by the identity of the module."""
        found = self._holders.get(identity)
        return found if isinstance(found, Module) else None

    def places_with(self, value: Any) -> list[tuple[Holder, Any]]:
        """Return where an object stands: the holders and the keys."""
        holders = self._holders.values()
        return [(at, key) for at in holders for key, held in at.held.items() if held is value]

    def is_in_a_tuple(self, value: Any) -> bool:
        """Return whether an object stands where nothing else can be put."""
        return any(is_a(holder.value, tuple) for holder, _ in self.places_with(value))

    def lists_at(self, places: Collection[Path | int]) -> list[Holder]:
        """Return the lists, tuples and deques of these places."""
        holders = self._holders.values()
        return [at for at in holders if isinstance(at, Sequence) and at.place in places]

    def memory(self) -> set[int]:
        """Return the memory of the tensors that stand somewhere."""
        values = (value for at in self._holders.values() for value in at.held.values())
        return {memory_of(value) for value in values if is_a(value, Tensor)}

    def holder_of(self, other: Holder) -> Holder | None:
        """Return the holder here of what another state had a holder of."""
        found = (one for one in self._holders.values() if one.place == other.place)
        return next(found, None)

    def _follow(self, value: Any, name: str, path: Path | None) -> None:
        """Note what stands in a value, and what code it may run."""
        if is_a(value, *_SKIPPED) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if is_a(value, FunctionType):
            self._follow_function(value)
        elif is_a(value, MethodType, partial):
            for key in ("__self__", "__func__") if is_a(value, MethodType) else _OF_PARTIAL:
                self._wait(getattr(value, key), name, None if path is None else (*path, key))
        elif is_a(value, type):
            self._follow_class(value)
        elif is_a(value, ModuleType):
            pass  # of a file what functions name alone
        elif (holder := holder_of(value, name, path)) and self._is_followed(value, holder):
            self._add(holder)
            self._wait(type(value))

    def _is_followed(self, value: Any, holder: Holder) -> bool:
        if items_of(value) is not None or isinstance(holder, Module | Opaque):
            return True
        is_known = not is_users_class(type(value)) and module_name(type(value)) not in _OF_PYTHON
        return not is_known and bool(attributes_of(value))

    def _add(self, holder: Holder) -> None:
        self._holders[id(holder.value)] = holder
        is_by_name = holder.path is None and type(holder) is Holder
        for key, value in holder.held.items():
            found = value, holder.label(key), holder.path_of(key)
            self._wait_for(key, found) if is_by_name else self._waiting.append(found)
        if isinstance(holder, Module):
            for part in holder.parts():
                self._seen.add(id(part.value))
                self._add(part)

    def _wait(self, value: Any, name: str = "", path: Path | None = None) -> None:
        self._waiting.append((value, name, path))

    def _wait_for(self, name: str, found: _Found) -> None:
        """Let something be followed once code that is followed has the name by which it is read."""
        (self._waiting if name in self.names else self._unnamed[name]).append(found)

    def _follow_function(self, function: FunctionType) -> None:
        code = function.__code__
        if id(code) in self._seen:
            return
        if not is_users_function(function):  # but that may be made around one that is
            cells = (
                cell.cell_contents for cell in function.__closure__ or () if cell != CellType()
            )
            for inner in cells:
                if is_a(inner, FunctionType, MethodType, partial):
                    self._wait(inner)
            return
        self._seen.add(id(code))
        names = _names_in(code)
        self._follow_globals(function.__globals__, names)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if id(cell) not in self._holders:
                self._add(Cell(cell, f"{name} of {function.__qualname__}", None))
        self._add(Holder(function, function.__qualname__, None))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._wait(value, f"a default of {function.__qualname__}")
        for name in names:
            if name in self.names:
                continue
            self.names.add(name)
            self._waiting += self._unnamed.pop(name, ())

    def _follow_globals(self, space: dict[str, Any], names: Iterable[str], owner: str = "") -> None:
        holder = self._holders.get(id(space))
        if not isinstance(holder, Globals):
            holder = self._holders[id(space)] = Globals(space, owner)
        for name in names:
            if name in holder.names:
                continue
            holder.names[name] = None
            if name not in space:
                continue
            value = holder.held[name] = space[name]
            if not is_a(value, ModuleType):
                self._wait(value, holder.label(name))
        for name in names:
            value = space.get(name)
            if is_a(value, ModuleType) and is_users_module(value):  # type: ignore[arg-type]
                inner: Any = space_of(value)
                if not {*names} <= getattr(self._holders.get(id(inner)), "names", {}).keys():
                    self._follow_globals(inner, names, name)

    def _follow_class(self, kind: type) -> None:
        for base in bases_of(kind):
            self._wait(base)
        if not is_users_class(kind):
            return
        self._add(ClassSpace(kind, class_name(kind), None))
        for name, member in class_space_of(kind).items():
            for function in _functions_of(member):
                is_called = name.startswith("__") and name not in _NEVER_CALLED
                if is_called or name == "forward":
                    self._wait(function)
                else:
                    self._wait_for(name, (function, "", None))


@contextmanager
def state_put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards everything holds what it held, whatever runs of the model have changed within."""
    state = PythonState(model)
    try:
        yield
    finally:
        state.put_back()


def is_switch(change: Change) -> bool:
    """Return whether code outside of the model has made something once and for all: what it does
    then, as to register an operator, it may not do twice."""
    is_new = change.before is None or change.before is ABSENT or change.before is False
    is_made = change.value is not ABSENT and type(change.value) not in (int, float)
    is_shared = change.holder.path is None and change.kind == "set"
    return is_shared and is_new and is_made and not has_tensors(change.value)


_OF_PYTHON = (
    "types",
    "collections",
)  # whose SimpleNamespace, UserDict, ... hold what users put there
_OF_PARTIAL = "func", "args", "keywords"
_NEVER_CALLED = {"__init__", "__repr__", "__del__", "__reduce__", "__getstate__", "__setstate__"}


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of what stands in a class."""
    if is_a(member, property):
        found = [member.fget, member.fset, member.fdel]
    elif is_a(member, cached_property):
        found = [member.func]
    else:
        found = [getattr(member, "__func__", member) if is_a(member, *_METHODS) else member]
    yield from (one for one in found if is_a(one, FunctionType))


_METHODS = staticmethod, classmethod


@cache
def _names_in(code: CodeType) -> dict[str, None]:
    """Return the names of globals and attributes in code, in their order there, with that of
    functions in it; words that it may give to `getattr` are names, too."""
    names = dict.fromkeys(code.co_names)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            names |= _names_in(one)
        elif isinstance(one, str) and one.isidentifier():
            names[one] = None
    return names
