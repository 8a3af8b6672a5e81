"""Operators that read how their input lies in memory, which is no part of a captured program."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of
from autopar.capture.normalisations.shapes import as_call
from autopar.errors import InvalidInput
from autopar.strategies import Call, Rule, register_rule
from autopar.strategies.node_info import info
from autopar.strategies.shapes import same_dims

aten = torch.ops.aten


def strides_are_written_out(draft: GraphBuilder) -> None:
    """as_strided reads the elements in the order in which the model had them in memory."""
    for node in draft.calls(aten.as_strided.default):
        x, size, stride, offset = (
            argument(node, name) for name in ("self", "size", "stride", "storage_offset")
        )
        value: Tensor = info(x).val
        order = sorted(range(value.ndim), key=lambda dim: -value.stride()[dim])
        offset = 0 if offset is None else offset - value.storage_offset()
        last = offset + sum((length - 1) * step for length, step in zip(size, stride))
        if not value.permute(order).is_contiguous() or offset < 0 or last >= value.numel():
            raise InvalidInput(
                "as_strided reads elements of its input",
                got=f"{tuple(size)} with strides {tuple(stride)} of {shape_of(x)} with strides "
                f"{value.stride()}, a part of a larger tensor",
                remedy="slice or index the tensor, or make it contiguous() before",
                source=info(node).source,
            )
        if order != sorted(order):
            with draft.graph.inserting_before(node):
                x = draft.call(node, *as_call(x, order))
        draft.replace(node, strided, x, size, stride, offset)


def bits_are_of_pieces(draft: GraphBuilder) -> None:
    """view(dtype) takes values of any strides."""
    for node in draft.calls(aten.view.dtype):
        draft.replace(node, bits, *node.args, **node.kwargs)


def strided(x: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """The elements of `x`, in the order of its dims, seen with other strides."""
    return x.contiguous().as_strided(size, stride, offset).clone()


def bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.view(dtype), whatever the strides of a rank's piece."""
    return x.contiguous().view(dtype)


def _of_bits(call: Call) -> Rule:
    """Elements of another size are parts of the last dim, which stays whole then."""
    same = call.shapes[0] == call.shape
    return same_dims(call, () if same else [len(call.shape) - 1], passes=())


register_rule(bits, _of_bits)
