"""Results: an operator that gives several tensors is one call, and a node for each that is used.

    topk = topk(x, 2)            : (f32[8, 2], i64[8, 2])
    result = result(topk, 0)     : f32[8, 2]

The call's value, and type, is a tuple, lists in it flattened. Only its results read it: they are
the values that move between ranks, in the layouts that the call's strategy gives them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.strategies.node_info import flat_values, info


def result(values: Any, place: int) -> torch.Tensor:
    """Return one tensor among the results of an operator that gives several."""
    return flat_values(values)[place]


def is_result(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is result


def has_results(node: fx.Node) -> bool:
    """Return whether a call gives several tensors, or a list of them."""
    return node.op == "call_function" and isinstance(info(node).val, list | tuple)


def maker(value: fx.Node) -> fx.Node:
    """Return the call that gives `value`: the node itself, or the call whose result it is."""
    return value.args[0] if is_result(value) else value  # type: ignore[return-value]


def result_index(value: fx.Node) -> int:
    """Return the number of a value among the results of its call."""
    return value.args[1] if is_result(value) else 0  # type: ignore[return-value]


def values_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a call's values: the call itself, or each result that is used."""
    return list(node.users) if has_results(node) else [node]


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the (fake) tensors of a node's value."""
    return tuple(leaf for leaf in info(node).values if isinstance(leaf, torch.Tensor))


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments of a call in their order, each as often as it is given."""
    arguments: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), arguments.append)
    return arguments
