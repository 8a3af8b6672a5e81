"""Fusion: a bias that capture set apart goes back into its linear operator.

Comes last of the passes on types: `add(linear(x, w), b)` with nothing moved between the two is
`linear(x, w, b)` again, one kernel.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def fuse_biases(graph: fx.Graph) -> fx.Graph:
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
            and bias.meta["val"].ndim == 1
            and bias.meta["val"].shape[0] == product.meta["val"].shape[-1]
            and bias.meta["val"].dtype == product.meta["val"].dtype
        ):
            with graph.inserting_before(node):
                fused = graph.call_function(aten.linear.default, (*product.args, bias))
            fused.meta = dict(node.meta)
            fused.meta["calls"] = (*product.meta["calls"], *node.meta["calls"])
            fused.meta["saved"] = product.meta.get("saved", ())
            fused.meta["wants"] = (*product.meta["wants"], node.meta["wants"][1])
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            graph.erase_node(product)
            fused.name = node.name
    return graph
