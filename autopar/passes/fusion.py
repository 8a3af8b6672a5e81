"""Fusion: a bias that capture set apart goes back into its linear operator.

Runs after `insert_movements`: `add(linear(x, w), b)` with nothing moved between the two is
`linear(x, w, b)` again, one kernel.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.pass_context import RewriteContext
from autopar.strategies.node_info import info

aten = torch.ops.aten


def fuse_biases(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Fuse every bias that directly follows its linear operator."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        product, bias = node.args
        if (
            isinstance(product, fx.Node)
            and isinstance(bias, fx.Node)
            and bias is not product
            and product.target is aten.linear.default
            and len(product.args) == 2
            and len(product.users) == 1
            and info(bias).val.ndim == 1
            and info(bias).val.shape[0] == info(product).val.shape[-1]
            and info(bias).val.dtype == info(product).val.dtype
        ):
            node.target, node.args = aten.linear.default, (*product.args, bias)
            info(node).update(
                calls=(*info(product).calls, *info(node).calls),
                saved=info(product).saved,
                wants=(*info(product).wants, info(node).wants[1]),
            )
            graph.erase_node(product)
    return graph
