"""Attributes: what forward reads of the modules of a block, and whether another block has the same.

Whether what is read holds the same as before is for `named.py` to say.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from autopar.base.user_code import is_users_frame
from autopar.capture.hooks import replaced
from autopar.capture.object_contents import ABSENT, PLAIN

_OF_STRUCTURE = ("_parameters", "_buffers", "_modules")


class Reads:
    """Of a block."""

    def __init__(self, block: nn.Module) -> None:
        self.paths = {id(module): path for path, module in block.named_modules()}
        self.found: dict[tuple[str, str], Any] = {}
        self.is_whole = True  # nothing was read besides


def is_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects, or equal plain ones."""
    if len(some) != len(others):
        return False
    for one, two in zip(some, others):
        if one is not two and (type(one) is not type(two) or type(one) not in PLAIN or one != two):
            return False
    return True


@contextmanager
def noted(reads: Reads) -> Iterator[None]:
    """Note which attributes of the modules of a block forward reads."""
    plain = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        path = reads.paths.get(id(self))
        if path is not None and name not in _OF_STRUCTURE and (path, name) not in reads.found:
            if name == "__dict__":
                reads.is_whole &= not is_users_frame(sys._getframe(1))
            elif not name.startswith("__"):
                reads.found[path, name] = plain(self, "__dict__").get(name, ABSENT)
        return plain(self, name)

    with replaced(nn.Module, "__getattribute__", read):
        yield


def has_same(block: nn.Module, reads: Reads) -> bool:
    """Whether all that forward has read of another is the same in this block."""
    modules = dict(block.named_modules())
    for (path, name), read in reads.found.items():
        value = vars(modules[path]).get(name, ABSENT)
        if value is not read and not _is_like(read, value, reads, modules):
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
    if isinstance(value, dict):
        return alike(*([x for pair in dict.items(d) for x in pair] for d in (value, other)))
    if isinstance(value, list | tuple):
        return alike(value, other)
    if isinstance(value, set | frozenset):
        return {type(x) for x in value} <= {*PLAIN} and bool(value == other)
    return value is other
