"""Operators that read how their input lies in memory, which is no part of a captured program."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from autopar.capture.graph_builder import GraphBuilder, Site, rewrites
from autopar.capture.normalisations.shapes import as_call
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall, Rule, register_rule
from autopar.strategies.node_info import info
from autopar.strategies.rules.indexing import all_whole
from autopar.strategies.rules.shapes import same_dims

aten = torch.ops.aten


@rewrites(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
def strides_are_written_out(call: Site) -> fx.Node:
    """as_strided reads the elements in the order in which the model had them in memory."""
    x, size, stride, offset = (call[name] for name in ("self", "size", "stride", "storage_offset"))
    written = call.get("src")
    value: Tensor = info(x).val
    order = sorted(range(value.ndim), key=lambda dim: -value.stride()[dim])
    offset = 0 if offset is None else offset - value.storage_offset()
    last = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if not value.permute(order).is_contiguous() or offset < 0 or last >= value.numel():
        raise InvalidInput(
            "as_strided reads elements of its input",
            got=f"{tuple(size)} with strides {tuple(stride)} of {call.shapes[0]} with strides "
            f"{value.stride()}, a part of a larger tensor",
            remedy="slice or index the tensor, or make it contiguous() before",
            source=call.source,
        )
    if order != sorted(order):
        x = call.make(*as_call(x, order))
    if written is None:
        view = as_strided if call.node.target is aten.as_strided.default else strided
        return call.make(view, x, size, stride, offset)
    result = call.make(strided_scatter, x, written, size, stride, offset)
    if order == sorted(order):
        return result
    return call.make(*as_call(result, [order.index(dim) for dim in range(value.ndim)]))


def strided_views_are_copies(builder: GraphBuilder) -> None:
    """Once nothing is written any more, to what they view or through them."""
    for node in builder.calls(as_strided):
        node.target = strided
        info(node).val = builder.evaluate(strided, node.args, node.kwargs)


@rewrites(aten.view.dtype)
def bits_are_of_pieces(call: Site) -> fx.Node:
    """view(dtype) takes values of any strides."""
    return call.make(bits, *call.arguments.values())


def as_strided(x: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """A view of `x`, which lies in order."""
    return x.contiguous().as_strided(size, stride, offset)


def strided(x: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """The elements of `x`, in the order of its dims, seen with other strides."""
    return x.contiguous().as_strided(size, stride, offset).clone()


def strided_scatter(
    x: Tensor, written: Tensor, size: list[int], stride: list[int], offset: int
) -> Tensor:
    """`x` with other elements where these are seen with other strides."""
    return x.contiguous().as_strided_scatter(written, size, stride, offset)


def bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.view(dtype), whatever the strides of a rank's piece."""
    return x.contiguous().view(dtype)


def _of_bits(call: OperatorCall) -> Rule:
    """Elements of another size are parts of the last dim, which stays whole then."""
    same = call.shapes[0] == call.shape
    return same_dims(call, () if same else [len(call.shape) - 1], passes=())


register_rule(bits, _of_bits)
register_rule(strided, partial(all_whole, linear=(0,)))
register_rule(strided_scatter, partial(all_whole, linear=(0, 1)))
