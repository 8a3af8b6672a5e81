"""Matrix products: linear and matmul are the only forms; a bias is an `add` of its own.

A later pass fuses a bias back where nothing moves between the product and the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import Site, rewrites, shape_of
from autopar.strategies.node_info import info

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


_SUMS = (aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addr.default)


@rewrites(*_SUMS, aten.addbmm.default)
def split_sums_of_products(call: Site) -> fx.Node | None:
    """addmm, baddbmm, addmv and addr are a product and an add; addbmm sums its products besides.

    With beta=0 the bias is not read and has a gradient of zeros all the same: torch's own call."""
    bias, left, right, beta, alpha = call.arguments.values()
    if beta == 0:
        return None
    if call.node.target is aten.addbmm.default:
        product = call.make(aten.einsum.default, "bmk,bkn->mn", [left, right])
    elif call.node.target is aten.addr.default:
        product = call.make(aten.outer.default, left, right)
    else:
        product = call.make(aten.matmul.default, left, right)
    if alpha != 1:
        product = call.make(aten.mul.Tensor, product, alpha)
    if beta != 1:
        bias = call.make(aten.mul.Tensor, bias, beta)
    return call.make(aten.add.Tensor, product, bias)


@rewrites(aten.mm.default, aten.bmm.default)
def products_are_matmul(call: Site) -> fx.Node:
    """mm and bmm are matmul, which takes any number of dims."""
    return call.make(aten.matmul.default, *call.inputs)


@rewrites(aten.matmul.default)
def transposed_products_are_linear(call: Site) -> fx.Node | None:
    """x @ w.T is linear(x, w); x @ w stays a matmul, so that w is never transposed."""
    x, right = call.inputs
    if right.target is not aten.transpose.int or len(shape_of(right)) != 2:
        return None
    return call.make(aten.linear.default, x, right.args[0])


@rewrites(aten.linear.default, *_CONVOLUTIONS)
def set_biases_apart(call: Site) -> fx.Node | None:
    """linear and convolutions without bias, then the bias is added."""
    bias, node = call["bias"], call.node
    if node.target is aten.linear.default:
        if bias is None:
            node.args = node.args[:2]
            return None
        product = call.make(aten.linear.default, *node.args[:2])
        return call.make(aten.add.Tensor, product, bias)
    if bias is None:
        return None
    args: list[Any] = [*node.args[:2], None, *node.args[3:]]
    kwargs = {name: value for name, value in node.kwargs.items() if name != "bias"}
    product = call.make(node.target, *args, **kwargs)  # type: ignore[arg-type]
    column = [shape_of(bias)[0]] + [1] * (len(shape_of(node.args[1])) - 2)
    return call.make(aten.add.Tensor, product, call.make(aten.reshape.default, bias, column))


def biased(product: fx.Node) -> fx.Node | None:
    """Return the sum of a product with the bias that was set apart from it; None without one."""
    total = next(iter(product.users)) if len(product.users) == 1 else None
    if total is None or total.target is not aten.add.Tensor or len(total.args) != 2:
        return None
    places = [(info(node).module, info(node).source) for node in (product, total)]
    bias: Any = total.args[1]
    if places[0] != places[1] or total.args[0] is not product or not isinstance(bias, fx.Node):
        return None
    if product.target is aten.linear.default:
        return total if info(bias).val.ndim == 1 else None
    is_column = bias.target is aten.reshape.default
    return total if product.target in _CONVOLUTIONS and is_column else None


@rewrites(*_PADDED)
def pad_by_numbers(call: Site) -> fx.Node | None:
    """Convolutions padded by name ("same", "valid") are padded by numbers where these exist."""
    x, weight, bias, stride, named, dilation, groups = call.arguments.values()
    rank = len(shape_of(weight)) - 2
    padding = [0] * rank
    if named == "same":
        steps = list(dilation) * (rank if rank > 1 else 1)
        spans = [d * (k - 1) for d, k in zip(steps, shape_of(weight)[2:])]
        if any(span % 2 for span in spans):
            return None
        padding = [span // 2 for span in spans]
    made = _PADDED[call.node.target]  # type: ignore[index]
    return call.make(made, x, weight, bias, stride, padding, dilation, groups)
