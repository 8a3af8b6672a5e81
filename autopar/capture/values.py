"""Values: the fake tensor of every node, and whether a gradient flows through it.

Runs the whole graph on fake tensors with autograd on, so that `differentiable` is what autograd
itself would say.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.gradients import passed_over
from autopar.capture.graph_builder import GraphBuilder, fake_like
from autopar.capture.marker import ANNOTATE
from autopar.program.equality import constants_of
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.results import is_result


def refresh(builder: GraphBuilder) -> None:
    """Renew `val` alone, in a program that may still write to its values."""
    for node in builder.calls():
        assert callable(node.target)
        info(node).val = builder.evaluate(node.target, node.args, node.kwargs)


def refresh_with_gradients(builder: GraphBuilder) -> None:
    """Renew `val` and set `differentiable` on all nodes; calls that are alike are run once.

    An input that autograd passes over, as a weight of classes, is detached: else a gradient flows.
    """
    live: dict[fx.Node, Any] = {}
    seen: dict[Hashable, tuple[Any, list[int]]] = {}
    silent: list[tuple[fx.Node, fx.Node]] = []  # operators and such inputs
    with builder.mode, torch.enable_grad():
        for node in builder.graph.nodes:
            if node.op == "placeholder":
                value = info(node).val
                is_tensor = isinstance(value, Tensor)
                live[node] = fake_like(builder.mode, value) if is_tensor else value
            elif node.op != "call_function":
                continue
            elif node.target is ANNOTATE or is_result(node):
                args = fx.map_arg(node.args, live.__getitem__)
                live[node] = args[0] if node.target is ANNOTATE else node.target(*args)
            else:
                inputs = node.all_input_nodes
                key = _described(node, [live[value] for value in inputs])
                if key not in seen:
                    seen[key] = _run(node, [live[value] for value in inputs])
                live[node], over = seen[key]
                silent += [(node, inputs[position]) for position in over]
            learns = any(
                one.requires_grad for one in flat_values(live[node]) if isinstance(one, Tensor)
            )
            info(node).differentiable = learns
    apart: dict[int, Tensor] = {}  # of what calls that are alike have made, by identity

    def detached(made: Tensor) -> Tensor:
        if id(made) not in apart:
            apart[id(made)] = made.detach()
        return apart[id(made)]

    for node, made in live.items():
        if node.op == "call_function":
            value = pytree.tree_map_only(Tensor, detached, made)
            info(node).update(val=flat_values(value) if isinstance(value, list | tuple) else value)
    for node, read in silent:
        with builder.graph.inserting_before(node):
            cut_off = builder.call(node, torch.ops.aten.detach.default, read)
        info(cut_off).differentiable = False
        node.replace_input_with(read, cut_off)


def _run(node: fx.Node, values: Sequence[Any]) -> tuple[Any, list[int]]:
    """What a call makes of such inputs, as leaves; of these, which autograd passes over."""
    leaves = [_leaf(value) for value in values]
    given = dict(zip(node.all_input_nodes, leaves))
    args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    over: list[Tensor] = []
    if any(leaf.requires_grad for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)):
        over = passed_over(flat_values(made), leaves)
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    return pytree.tree_map_only(Tensor, _leaf, made), [places[id(tensor)] for tensor in over]


def _leaf(value: Any) -> Any:
    """The same apart from what it was made of: the graph of autograd ends here."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _described(node: fx.Node, values: Sequence[Any]) -> Hashable:
    """Equal for calls that make the same of such inputs."""
    return node.target, constants_of(node), *map(_form, values)


def _form(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(value)
    place = value.stride(), value.storage_offset(), value.device
    return tuple(value.shape), value.dtype, value.requires_grad, *place
