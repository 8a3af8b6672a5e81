"""Values: the fake tensor of every node, and whether a gradient flows through it.

Runs the whole graph on fake tensors with autograd on, so that `differentiable` is what autograd
itself would say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.draft import Draft
from autopar.capture.marker import ANNOTATE


def refresh(draft: Draft) -> None:
    """Renew `val` alone, in a program that may still write to its values."""
    for node in draft.calls():
        assert callable(node.target)
        node.meta["val"] = draft.evaluate(node.target, node.args, node.kwargs)


def propagate(draft: Draft) -> None:
    """Renew `val` and set `differentiable` on all nodes."""
    live: dict[fx.Node, Any] = {}
    with draft.mode, torch.enable_grad():
        for node in draft.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                # A leaf of its own: the graph of autograd ends here.
                live[node] = value.detach().requires_grad_(value.requires_grad)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), live.__getitem__)
                live[node] = args[0] if node.target is ANNOTATE else node.target(*args, **kwargs)
            else:
                continue
            node.meta["differentiable"] = any(
                leaf.requires_grad
                for leaf in pytree.tree_leaves(live[node])
                if isinstance(leaf, torch.Tensor)
            )
    for node, value in live.items():
        if node.op == "call_function":
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
