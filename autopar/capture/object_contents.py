"""Tells what stands in an object, without asking the object.

A model meets objects of any library: modules that import others when one asks for an attribute,
proxies, arrays whose truth nobody can say. So classes are read off `type(value)`, attributes from
where Python keeps them, and entries by the methods of `dict`, `list`, ... themselves: no code of
the object's own class runs.

>>> values_in(partial(scale, 2, by=3))
[scale, (2,), {'by': 3}]
>>> reader_of(random.Random()) is None   # what it holds, nobody sees
True
"""

from __future__ import annotations

import gc
import itertools
import logging
import operator
import threading
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from autopar.base.user_code import is_users_class

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
ABSENT = object()
LEAVES = (  # that hold nothing, or what forward does not read
    *(torch.dtype, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, fx.Node, Tensor, types.CodeType),
    *(logging.Logger, type(threading.Lock()), type(threading.RLock())),
    *(types.GenericAlias, types.UnionType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_POINTER = tuple.__itemsize__
_ask_class = type.__getattribute__  # past what a metaclass answers


def is_iterator(value: Any) -> bool:
    """Return whether an object is one of Python's own iterators, of which each look takes one."""
    return is_a(value, *_ITERATORS, *_WRAPPERS, itertools.count)


def is_a(value: Any, *kinds: type) -> bool:
    """Return whether an object is of one of these classes, whatever its `__class__` says."""
    return issubclass(type(value), kinds)


def space_of(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object or a module; None where it has none."""
    get = _shape_of(type(value)).get_space
    with suppress(AttributeError):  # of a compiled class
        return None if get is None else get(value)
    return None


def class_space_of(kind: type) -> dict[str, Any]:
    """Return what stands in a class by name, in a new dict."""
    return dict(_ask_class(kind, "__dict__"))


def bases_of(kind: type) -> tuple[type, ...]:
    """Return the classes that a class is made from."""
    bases: tuple[type, ...] = _ask_class(kind, "__bases__")
    return bases


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name: those in its `__dict__` and in its slots."""
    slots = {slot.__name__: _in_slot(slot, value) for slot in _shape_of(type(value)).slots}
    in_slots = {name: one for name, one in slots.items() if one is not ABSENT}
    return (space_of(value) or {}) | in_slots


def items_of(value: Any) -> dict[Any, Any] | None:
    """Return what stands in a container by key, by number or, in a set, by itself; None for an
    object that is no container."""
    if is_a(value, dict):
        return dict(dict.items(value))
    base: Any = next((kind for kind in _CONTAINERS if is_a(value, kind)), None)
    if base in (set, frozenset):
        return dict.fromkeys(base(value))
    return None if base is None else dict(enumerate(base.__iter__(value)))


def reader_of(value: Any) -> Callable[[], list[Any]] | None:
    """Return a function that lists what tells whether an object changes, one level deep; None where
    the object may hold what nobody sees."""
    shape = _shape_of(type(value))
    read = shape.read
    if read is None or not (shape.slots or shape.get_space):
        return read and partial(read, value)

    def look() -> list[Any]:
        held = read(value)
        if shape.get_space is not None:
            held = held + _of_dict(shape.get_space(value))
        return held + [_in_slot(slot, value) for slot in shape.slots]

    return look


def values_in(value: Any) -> list[Any]:
    """Return all that stands in an object, one level deep, as far as anybody sees it."""
    read = reader_of(value)
    if read is not None:
        return read()
    return [*(items_of(value) or {}).values(), *attributes_of(value).values()]


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def _of_dict(value: Any, items: Callable[[Any], Any] = dict.items) -> list[Any]:
    return [x for pair in items(value) for x in pair]


def _of_each(value: Any, each: Callable[[Any], Any]) -> list[Any]:
    return [*each(value)]


def _of_members(kind: type, *names: str) -> Callable[[Any], list[Any]]:
    members = [vars(kind)[name] for name in names]
    return lambda value: [_in_slot(member, value) for member in members]


def _of_array(value: Any) -> list[Any]:
    plain = np.ndarray.view(value, np.ndarray)
    form = [str(plain.dtype), str(plain.shape), str(plain.strides)]
    return form + (plain.ravel().tolist() if plain.dtype.hasobject else [hash(plain.tobytes())])


def _of_generator(value: Any) -> list[Any]:
    frame = value.gi_frame  # its variables are what it was given, besides
    return [] if frame is None else [frame.f_lasti, value.gi_yieldfrom, *_of_dict(frame.f_locals)]


def _of_builtin(value: Any) -> list[Any]:
    owner = value.__self__
    return [] if is_a(owner, types.ModuleType, type) else [owner]


def _of_iterator(value: Any) -> list[Any]:
    """What is left in an iterator, as pickle would write it, with the iterators inside of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12 on
        reduced: Any = value.__reduce__()
    return [_left(one) for one in reduced[1:]]


def _left(value: Any) -> Any:
    if type(value) in (tuple, list):
        return tuple(map(_left, value))
    is_iterator = type(value) in (*_ITERATORS, *_WRAPPERS)
    return tuple(_OF[type(value)](value)) if is_iterator else value


def _nothing(value: Any) -> list[Any]:
    return []


_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_EMPTY: tuple[Any, ...] = ((), [], {}, "")
_ITERATORS: list[Any] = [type(iter(one)) for one in (*_EMPTY, set(), range(0), range(1 << 70))]
_WRAPPERS: tuple[Any, ...] = (
    *(map, zip, enumerate, filter, reversed, itertools.cycle, itertools.chain, itertools.islice),
    *(itertools.accumulate, itertools.starmap, itertools.takewhile, itertools.dropwhile),
    *(itertools.compress, itertools.zip_longest, itertools.repeat),
)
_default_factory = _of_members(defaultdict, "default_factory")
_OF: dict[type, Callable[[Any], list[Any]]] = {
    dict: _of_dict,
    OrderedDict: partial(_of_dict, items=OrderedDict.items),
    defaultdict: lambda value: _default_factory(value) + _of_dict(value),
    types.MappingProxyType: gc.get_referents,  # the mapping, which may be of any class
    **{kind: partial(_of_each, each=kind.__iter__) for kind in _CONTAINERS},
    types.MethodType: lambda value: [value.__func__, value.__self__],
    types.BuiltinFunctionType: _of_builtin,
    types.MethodWrapperType: lambda value: [value.__self__],
    partial: _of_members(partial, "func", "args", "keywords"),
    property: _of_members(property, "fget", "fset", "fdel"),
    staticmethod: _of_members(staticmethod, "__func__"),
    classmethod: _of_members(classmethod, "__func__"),
    type(cache(_nothing)): _nothing,  # what it wraps is an attribute
    weakref.ref: lambda value: [weakref.ref.__call__(value)],
    ContextVar: lambda value: [value.get(None)],
    threading.local: _nothing,
    types.SimpleNamespace: _nothing,
    np.ndarray: _of_array,
    bytearray: lambda value: [hash(bytes(memoryview(value)))],
    array: lambda value: [hash(array.tobytes(value))],
    types.GeneratorType: _of_generator,
    itertools.count: lambda value: [itertools.count.__repr__(value)],
    **{kind: lambda value: [operator.length_hint(value)] for kind in _ITERATORS},
    **dict.fromkeys(_WRAPPERS, _of_iterator),
    **dict.fromkeys((int, float, complex, str, bytes, object), _nothing),
}
_BUILT_IN = {id(kind) for kind in _OF}  # a metaclass may have a hash and an equality of its own


@dataclass(frozen=True)
class _Shape:
    """Where the objects of a class keep what stands in them."""

    read: Callable[[Any], list[Any]] | None  # for what their built-in base holds; None: unseen
    slots: tuple[Any, ...]
    get_space: Callable[[Any], dict[str, Any]] | None


def _shape_of(kind: type) -> _Shape:
    is_hashed_by_identity = type(kind).__hash__ is type.__hash__
    return _known_shape_of(kind) if is_hashed_by_identity else _known_shape_of.__wrapped__(kind)


@lru_cache(maxsize=4096)
def _known_shape_of(kind: type) -> _Shape:
    bases = _ask_class(kind, "__mro__")
    at, base = next((at, one) for at, one in enumerate(bases) if id(one) in _BUILT_IN)
    spaces = [_ask_class(one, "__dict__") for one in bases]
    held = [one for space in spaces[:at] for one in space.values()]
    slots = tuple(one for one in held if type(one) is types.MemberDescriptorType)
    found = (space.get("__dict__") for space in spaces)
    kinds = types.GetSetDescriptorType, types.MemberDescriptorType
    get_space = next((one.__get__ for one in found if type(one) in kinds), None)
    sizes = ("dictoffset", "itemsize", "basicsize", "weakrefoffset")
    offset, item_size, size, weak = (_ask_class(kind, f"__{name}__") for name in sizes)
    is_varied = item_size > 0
    places = len(slots) + (weak > base.__weakrefoffset__)
    places += not base.__dictoffset__ and (offset > 0 or (offset < 0 and is_varied))
    has_hidden = size > base.__basicsize__ + places * _POINTER or (offset and get_space is None)
    read: Callable[[Any], list[Any]] | None = _OF[base]
    if has_hidden or (is_varied and not base.__itemsize__):  # something that no name leads to
        hashes = next(space["__hash__"] for space in spaces if "__hash__" in space)
        is_value = hashes is not None and hashes is not object.__dict__["__hash__"]
        read = _nothing if is_value and not is_users_class(kind) else None
    return _Shape(read, slots, get_space)
