"""Inside: what an object holds, of the types that are known.

>>> inside(partial(scale, 2, by=3))()
[scale, (2,), {'by': 3}]
>>> inside(random.Random()) is None   # what it holds, nobody sees
True
"""

from __future__ import annotations

import itertools
import logging
import operator
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from autopar.capture.hidden import Hiding
from autopar.capture.source import is_users

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
ABSENT = object()
_POINTER = tuple.__itemsize__

LEAVES = (  # that hold nothing, or what forward does not read
    *(torch.dtype, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, fx.Node, Tensor, Hiding),
    types.CodeType,
    *(logging.Logger, type(threading.Lock()), type(threading.RLock())),
    *(types.GenericAlias, types.UnionType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)


def _of_dict(value: Any, items: Callable[[Any], Any] = dict.items) -> list[Any]:
    return [x for pair in items(value) for x in pair]


def _of_each(value: Any, each: Callable[[Any], Any]) -> list[Any]:
    found: list[Any] = [*each(value)]
    return found


def _of_array(value: Any) -> list[Any]:
    about = [str(value.dtype), str(value.shape), str(value.strides)]
    return about + (value.ravel().tolist() if value.dtype.hasobject else [hash(value.tobytes())])


def _of_generator(value: Any) -> list[Any]:
    frame = value.gi_frame  # its variables are what it was given, besides
    return [] if frame is None else [frame.f_lasti, value.gi_yieldfrom, *_of_dict(frame.f_locals)]


def _of_builtin(value: Any) -> list[Any]:
    owner = value.__self__
    return [] if isinstance(owner, types.ModuleType | type) else [owner]


def _nothing(value: Any) -> list[Any]:
    return []


_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_EMPTY: tuple[Any, ...] = ((), [], {}, "")
_ITERATORS: list[Any] = [type(iter(one)) for one in _EMPTY]
_OF: dict[type, Callable[[Any], list[Any]]] = {
    dict: _of_dict,
    OrderedDict: partial(_of_dict, items=OrderedDict.items),
    defaultdict: lambda value: [value.default_factory, *_of_dict(value)],
    types.MappingProxyType: partial(_of_dict, items=types.MappingProxyType.items),
    **{kind: partial(_of_each, each=kind.__iter__) for kind in _CONTAINERS},
    types.MethodType: lambda value: [value.__func__, value.__self__],
    types.BuiltinFunctionType: _of_builtin,
    types.MethodWrapperType: lambda value: [value.__self__],
    partial: lambda value: [value.func, value.args, value.keywords],
    property: lambda value: [value.fget, value.fset, value.fdel],
    staticmethod: lambda value: [value.__func__],
    classmethod: lambda value: [value.__func__],
    type(cache(_nothing)): lambda value: [value.__wrapped__],
    weakref.ref: lambda value: [value()],
    ContextVar: lambda value: [value.get(None)],
    threading.local: _nothing,
    types.SimpleNamespace: _nothing,
    np.ndarray: _of_array,
    bytearray: lambda value: [hash(bytes(value))],
    array: lambda value: [hash(value.tobytes())],
    types.GeneratorType: _of_generator,
    itertools.count: lambda value: [repr(value)],
    **{kind: lambda value: [operator.length_hint(value)] for kind in _ITERATORS},
    **dict.fromkeys((int, float, complex, str, bytes, object), _nothing),
}


def inside(value: Any) -> Callable[[], list[Any]] | None:
    """What gives what tells whether a value changes, but for what that holds in turn; None where
    it may hold what nobody sees."""
    of, slots, has_space = _shape_of(type(value))  # type: ignore[arg-type]
    if of is None:
        return None
    if not slots and not has_space:
        return partial(of, value)

    def look() -> list[Any]:
        found = of(value)
        if has_space:
            found += _of_dict(object.__getattribute__(value, "__dict__"))
        return found + [_in_slot(slot, value) for slot in slots]

    return look


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


@lru_cache(maxsize=4096)
def _shape_of(
    kind: type,
) -> tuple[Callable[[Any], list[Any]] | None, tuple[Any, ...], bool]:
    """Of the objects of a class: how what it is built on is looked into, the slots, and whether
    they have a `__dict__`."""
    base = next(one for one in kind.__mro__ if one in _OF)
    own = kind.__mro__[: kind.__mro__.index(base)]
    found = (one for of in own for one in vars(of).values())
    slots = tuple(one for one in found if isinstance(one, types.MemberDescriptorType))
    offset, is_varied = kind.__dictoffset__, kind.__itemsize__ > 0
    places = len(slots) + (kind.__weakrefoffset__ > base.__weakrefoffset__)
    places += not base.__dictoffset__ and (offset > 0 or (offset < 0 and is_varied))
    has_hidden = kind.__basicsize__ > base.__basicsize__ + places * _POINTER
    if has_hidden or (is_varied and not base.__itemsize__):  # something that no name leads to
        is_value = kind.__hash__ not in (None, object.__hash__) and not is_of_users(kind)
        return (_nothing if is_value else None), (), False
    return _OF[base], slots, offset != 0


def is_of_users(kind: type) -> bool:
    """Whether a class is of the user's code, which may have no file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
    return kind.__module__ == "__main__" or is_users(file)
