"""Attributes: what forward reads of the modules of a block, and whether another block has the same.

What is read may hold other things, which may change: these are compared as well.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from autopar.capture.hooks import replaced
from autopar.capture.source import is_users

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_OF_STRUCTURE = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


@dataclass(eq=False)
class _Read:
    """What forward found in an attribute of a module, and what that held."""

    value: Any
    held: list[Any]


class Reads:
    """Of a block."""

    def __init__(self, block: nn.Module) -> None:
        self.paths = {id(module): path for path, module in block.named_modules()}
        self.found: dict[tuple[str, str], _Read] = {}
        self.is_whole = True  # nothing was read besides


def kept(block: nn.Module) -> list[Any]:
    """All that the modules of a block keep."""
    found: list[Any] = []
    for module in block.modules():
        for name, value in vars(module).items():
            found += [name, value, *held(value)]
    return found


def held(value: Any) -> list[Any]:
    """What stands in a value that can be changed, and in what that holds in turn."""
    found: list[Any] = []
    reached, seen = [value], {id(value)}
    while reached:
        inner = _inside(reached.pop())
        found += inner
        for one in inner:
            if type(one) not in PLAIN and id(one) not in seen:
                seen.add(id(one))
                reached.append(one)
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        pairs = dict.items(value) if isinstance(value, dict) else value.items()  # nothing is loaded
        return [x for pair in pairs for x in pair]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, Tensor | nn.Module | fx.Node | type | FunctionType | ModuleType):
        return []
    if isinstance(value, ContextVar):
        return [value.get(None)]
    if isinstance(value, np.ndarray | bytearray):
        return [hash(bytes(value))]
    if isinstance(value, GeneratorType):
        return [value.gi_frame and value.gi_frame.f_lasti]
    if isinstance(value, Iterator):  # how far it is; and as others, where it is no built-in one
        return [
            operator.length_hint(value, -1),
            repr(value),
            *getattr(value, "__dict__", {}).values(),
        ]
    return [x for pair in getattr(value, "__dict__", {}).items() for x in pair]


def is_kept(reads: Reads) -> bool:
    """Whether what was read holds what it held."""
    return all(is_equal(one.held, held(one.value)) for one in reads.found.values())


def is_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects, or equal plain ones."""
    return len(some) == len(others) and all(
        one is two or (type(one) is type(two) and type(one) in PLAIN and one == two)
        for one, two in zip(some, others)
    )


@contextmanager
def noted(reads: Reads) -> Iterator[None]:
    """Note which attributes of the modules of a block forward reads."""
    plain = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        path = reads.paths.get(id(self))
        if path is not None and name not in _OF_STRUCTURE and (path, name) not in reads.found:
            if name == "__dict__":
                reads.is_whole &= not is_users(sys._getframe(1).f_code.co_filename)
            elif not name.startswith("__"):
                value = plain(self, "__dict__").get(name, _ABSENT)
                reads.found[path, name] = _Read(value, held(value))
        return plain(self, name)

    with replaced(nn.Module, "__getattribute__", read):
        yield


def has_same(block: nn.Module, reads: Reads) -> bool:
    """Whether all that forward has read of another is the same in this block."""
    modules = dict(block.named_modules())
    for (path, name), read in reads.found.items():
        value = vars(modules[path]).get(name, _ABSENT)
        if not is_equal(read.held, held(read.value)):
            return False
        if value is not read.value and not _is_like(read.value, value, reads, modules):
            return False
    return True


def _is_like(value: Any, other: Any, reads: Reads, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a value of one block is to it what another value is to a block of these modules."""

    def alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
        pairs = zip(some, others)
        return len(some) == len(others) and all(_is_like(a, b, reads, modules) for a, b in pairs)

    if type(value) is not type(other):
        return False
    if type(value) in PLAIN:
        return bool(value == other)
    if isinstance(value, nn.Module):
        path = reads.paths.get(id(value))
        return other is (value if path is None else modules[path])
    if isinstance(value, MethodType):
        return alike((value.__func__, value.__self__), (other.__func__, other.__self__))
    if isinstance(value, functools.partial):
        return alike(*((p.func, p.args, p.keywords) for p in (value, other)))
    if isinstance(value, Mapping | list | tuple):
        return alike(_inside(value), _inside(other))
    if isinstance(value, set | frozenset):
        return {type(x) for x in value} <= {*PLAIN} and bool(value == other)
    return value is other
