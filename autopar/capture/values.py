"""Values: the fake tensor of every node, and whether a gradient flows through it.

Runs the whole graph on fake tensors with autograd on, so that `differentiable` is what autograd
itself would say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.gradients import passed_over
from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.marker import ANNOTATE
from autopar.strategies.node_info import flat, info
from autopar.strategies.results import is_result


def refresh(builder: GraphBuilder) -> None:
    """Renew `val` alone, in a program that may still write to its values."""
    for node in builder.calls():
        assert callable(node.target)
        info(node).val = builder.evaluate(node.target, node.args, node.kwargs)


def refresh_with_gradients(builder: GraphBuilder) -> None:
    """Renew `val` and set `differentiable` on all nodes.

    An input that autograd passes over, as a weight of classes, is detached: else a gradient flows.
    """
    live: dict[fx.Node, Any] = {}
    silent: list[tuple[fx.Node, fx.Node]] = []  # operators and such inputs
    with builder.mode, torch.enable_grad():
        for node in builder.graph.nodes:
            if node.op == "placeholder":
                value = info(node).val
                # A leaf of its own: the graph of autograd ends here.
                live[node] = value.detach().requires_grad_(value.requires_grad)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), live.__getitem__)
                live[node] = args[0] if node.target is ANNOTATE else node.target(*args, **kwargs)
            else:
                continue
            info(node).differentiable = any(
                leaf.requires_grad
                for leaf in pytree.tree_leaves(live[node])
                if isinstance(leaf, torch.Tensor)
            )
            if info(node).differentiable and not is_result(node):
                inputs = {id(live[value]): value for value in node.all_input_nodes}
                over = passed_over(flat(live[node]), [live[v] for v in inputs.values()])
                silent += [(node, inputs[id(tensor)]) for tensor in over]
    for node, made in live.items():
        if node.op == "call_function":
            value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            info(node).update(val=flat(value) if isinstance(value, list | tuple) else value)
    for node, read in silent:
        with builder.graph.inserting_before(node):
            detached = builder.call(node, torch.ops.aten.detach.default, read)
        info(detached).differentiable = False
        node.replace_input_with(read, detached)
