"""Operator record: what a call of forward computes of tensors that vary, to compare two calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch.tensors import memory_of
from autopar.capture.holders import Place
from autopar.capture.object_contents import PLAIN

_OF_FORM = {"shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "itemsize"}


class OperatorRecord(TorchFunctionMode):
    """What is computed of tensors that vary, with which plain values and other tensors.

    A tensor that does not vary, as a table, is told by how it is made, whether it is made anew or
    kept from a call before.
    """

    def __init__(self, varying: set[int]) -> None:
        """`varying`: the memory of tensors that vary."""
        super().__init__()
        self.made: list[Any] = []
        self.read: list[Place] = []
        self.kept: dict[int, Place] = {}  # by memory, what is not to be read
        self._varying, self._known = varying, dict[Any, int]()

    def begin(self, given: Iterable[Tensor]) -> None:
        self.made = []
        self._varying.update(map(memory_of, given))

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if _asks_of_form(function):
            return result
        leaves = pytree.tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        read, given = ([*map(memory_of, ones)] for ones in (tensors, results))
        self.read += [self.kept[memory] for memory in read if memory in self.kept]
        tables = [_view(one) for one, own in zip(tensors, read) if own not in self._varying]
        others = (self._known.get(table) for table in tables)
        call = (function, *(leaf for leaf in leaves if type(leaf) in PLAIN), *others)
        if self._varying.isdisjoint(read):
            views = {_view(one) for one in results}.difference(tables)  # not those of all of one
            self._known |= dict.fromkeys(views, hash(call))
            self._varying.difference_update(given)
        else:
            self.made.append(call)
            name = getattr(function, "__name__", "")
            is_in_place = name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
            self._varying.update(given, read if is_in_place else ())
        return result


def _view(tensor: Tensor) -> tuple[int, str]:
    """What tells a tensor from other views of its memory."""
    return memory_of(tensor), f"{tensor.storage_offset()} {tensor.shape} {tensor.stride()}"


def _asks_of_form(function: Any) -> bool:
    """Whether only an attribute is asked, as a shape."""
    return getattr(getattr(function, "__self__", None), "__name__", "") in _OF_FORM
