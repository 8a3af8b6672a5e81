"""Matrix products: linear and matmul are the only forms; a bias is an `add` of its own.

A later pass fuses a bias back where nothing moves between the product and the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of

aten = torch.ops.aten

_CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
_PADDED = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def split_sums_of_products(draft: GraphBuilder) -> None:
    """addmm, baddbmm and addmv are a matmul and an add; addbmm sums its products besides.

    With beta=0 the bias is not read and has a gradient of zeros all the same: torch's own call."""
    summing = (aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default)
    for node in draft.calls(*summing):
        bias, left, right = node.args
        beta, alpha = argument(node, "beta"), argument(node, "alpha")
        if beta == 0:
            continue
        with draft.graph.inserting_before(node):
            if node.target is aten.addbmm.default:
                product = draft.call(node, aten.einsum.default, "bmk,bkn->mn", [left, right])
            else:
                product = draft.call(node, aten.matmul.default, left, right)
            if alpha != 1:
                product = draft.call(node, aten.mul.Tensor, product, alpha)
            if beta != 1:
                bias = draft.call(node, aten.mul.Tensor, bias, beta)
        draft.replace(node, aten.add.Tensor, product, bias)


def products_are_matmul(draft: GraphBuilder) -> None:
    """mm and bmm are matmul, which takes any number of dims."""
    for node in draft.calls(aten.mm.default, aten.bmm.default):
        draft.replace(node, aten.matmul.default, *node.args)


def transposed_products_are_linear(draft: GraphBuilder) -> None:
    """x @ w.T is linear(x, w); x @ w stays a matmul, so that w is never transposed."""
    for node in draft.calls(aten.matmul.default):
        x, right = node.args
        if (
            isinstance(right, fx.Node)
            and right.target is aten.transpose.int
            and len(shape_of(right)) == 2
        ):
            draft.replace(node, aten.linear.default, x, right.args[0])


def set_biases_apart(draft: GraphBuilder) -> None:
    """linear and convolutions without bias, then the bias is added."""
    for node in draft.calls(aten.linear.default):
        bias = argument(node, "bias")
        if bias is None:
            node.args = node.args[:2]
            continue
        with draft.graph.inserting_before(node):
            product = draft.call(node, aten.linear.default, *node.args[:2])
        draft.replace(node, aten.add.Tensor, product, bias)
    for node in draft.calls(*_CONVOLUTIONS):
        bias = argument(node, "bias")
        if bias is None:
            continue
        weight = node.args[1]
        column = [-1] + [1] * (len(shape_of(weight)) - 2)
        with draft.graph.inserting_before(node):
            args: list[Any] = list(node.args)
            kwargs = {name: value for name, value in node.kwargs.items() if name != "bias"}
            args[2:3] = [None]
            product = draft.call(node, node.target, *args, **kwargs)  # type: ignore[arg-type]
            column[0] = shape_of(bias)[0]
            shaped = draft.call(node, aten.reshape.default, bias, column)
        draft.replace(node, aten.add.Tensor, product, shaped)


def pad_by_numbers(draft: GraphBuilder) -> None:
    """Convolutions padded by name ("same", "valid") are padded by numbers where these exist."""
    for node in draft.calls(*_PADDED):
        x, weight = node.args[:2]
        rank = len(shape_of(weight)) - 2
        dilation = list(argument(node, "dilation")) * (rank if rank > 1 else 1)
        padding = [0] * rank
        if argument(node, "padding") == "same":
            spans = [d * (k - 1) for d, k in zip(dilation, shape_of(weight)[2:])]
            if any(span % 2 for span in spans):
                continue
            padding = [span // 2 for span in spans]
        names = ("bias", "stride", "dilation", "groups")
        bias, stride, dilation, groups = (argument(node, name) for name in names)
        call = (x, weight, bias, stride, padding, dilation, groups)
        draft.replace(node, _PADDED[node.target], *call)  # type: ignore[index]
