"""Selections: what masks choose, of which only values tell how much it is.

A mask that follows from whole numbers of the inputs chooses as many as the example has: a number
that every batch is asked for again (decisions.py). Which ones they are, each batch says itself.
Whole numbers that a loss is given row by row (`labels.masked_select(labels >= 0)`, with the rows'
counts) are not counted: the loss reads them as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar.capture.fake import FakeTensor
from autopar.capture.graph_builder import is_mutable
from autopar.capture.hooks import replaced, while_it_runs

_aten = torch.ops.aten


class Rows:
    """What a mask chooses of whole numbers; any function of torch but a loss is given all of it."""

    def __init__(self, front: Tensor, mask: Tensor, chosen: Callable[[], Tensor]) -> None:
        self.front, self.mask, self.chosen = front, mask, chosen

    def in_front(self, counts: Tensor) -> Tensor:
        """A row for each row, with what is chosen at its front, if these are the rows' counts."""
        (counting, _), (mask, _) = traced_node(counts), traced_node(self.mask)
        if counting is None or mask is None or counting.target is not _aten.sum.dim_IntList:
            return self.chosen()
        of, dims, *_ = counting.args
        is_changed = any(is_mutable(user.target) for user in mask.users)
        is_counted = of is mask and dims in ([-1], [1]) and not is_changed
        return self.front if is_counted else self.chosen()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Rows, lambda rows: rows.chosen(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chosen(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() finds
        return Tensor

    __hash__ = object.__hash__


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Rows, *others: Any) -> Any:
        return getattr(self.chosen(), name)(*others)

    return operate


_MADE = "add sub mul truediv floordiv mod pow and or xor matmul lshift rshift"
_OTHERS = "eq ne lt le gt ge neg abs invert len iter contains bool int float index getitem"
for _name in (*(f"{side}{name}" for name in _MADE.split() for side in ("", "r")), *_OTHERS.split()):
    if hasattr(Tensor, f"__{_name}__"):
        setattr(Rows, f"__{_name}__", _operation(f"__{_name}__"))


class _Indexed(TorchFunctionMode):
    """Gives what is indexed to a function. A method set on the class would stay a slot of it."""

    def __init__(self, get_item: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self._get_item = get_item

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__getitem__:
            return self._get_item(*args)
        return function(*args, **(kwargs or {}))


@contextmanager
def selections_counted(model: nn.Module, count: Callable[[Tensor], int | None]) -> Iterator[None]:
    """Within, selections by masks of which `count` knows how many they choose have a shape."""

    def places(mask: Tensor) -> tuple[Tensor, ...] | None:
        number = count(mask) if isinstance(mask, FakeTensor) and mask.ndim else None
        if number is None:
            return None
        return torch.nonzero_static(mask, size=number).unbind(1)

    def entry(one: Any) -> tuple[Any, ...]:
        is_mask = isinstance(one, FakeTensor) and one.dtype is torch.bool
        found = places(one) if is_mask else None
        return (one,) if found is None else found

    def get_item(self: Tensor, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if any(isinstance(one, FakeTensor) and one.dtype is torch.bool for one in entries):
            index = tuple(made for one in entries for made in entry(one))
        return plain_item(self, index)

    def masked_select(self: Tensor, mask: Tensor) -> Any:
        if not isinstance(mask, FakeTensor):
            return plain_select(self, mask)
        shape = torch.broadcast_shapes(self.shape, mask.shape)
        values, wide = (one.expand(shape).clone() for one in (self, mask))  # as they are now

        def chosen() -> Tensor:
            found = places(wide)
            return plain_select(values, wide) if found is None else plain_item(values, found)

        if self.ndim != 2 or self.shape != mask.shape or self.is_floating_point():
            return chosen()
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
        # Behind what is chosen stands what no loss reads.
        return Rows(values.gather(1, order).clamp(min=0), mask, chosen)

    def nonzero(self: Tensor, *, as_tuple: bool = False) -> Any:
        found = places(self != 0)
        if found is None:
            return plain_nonzero(self, as_tuple=as_tuple)
        return found if as_tuple else torch.stack(found, 1)

    def where(condition: Tensor, *others: Any, **named: Any) -> Any:
        if others or named:
            return plain_where(condition, *others, **named)
        return nonzero(condition, as_tuple=True)

    plain_item, plain_select = Tensor.__getitem__, Tensor.masked_select
    plain_nonzero: Callable[..., Any] = Tensor.nonzero
    plain_where: Callable[..., Any] = torch.where
    with ExitStack() as stack:
        stack.enter_context(while_it_runs(model, partial(_Indexed, get_item)))
        for owner in (Tensor, torch):
            stack.enter_context(replaced(owner, "masked_select", masked_select))
            stack.enter_context(replaced(owner, "nonzero", nonzero))
        stack.enter_context(replaced(torch, "where", where))
        yield
