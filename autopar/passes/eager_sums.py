"""Eager sums: which sums of a rank's program are made in place, and which the caller completes.

For graphs of one rank that run eagerly, after `localize`. The functions that are swapped in
overwrite their input, or leave a sum to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.collectives.eager_movements import defer_sum, identity_then_sum_in_place, sum_in_place
from autopar.passes.pass_context import LocalContext
from autopar.strategies import traits_of
from autopar.strategies.node_info import info

movements = torch.ops.autopar


def choose_sums(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Swap in the quickest function for every sum; `defer_sum` if the caller completes it."""
    for node in graph.nodes:
        is_sum = node.target is movements.all_reduce.default
        if is_sum and _is_returned(node, context.caller_sums) and info(node).region is None:
            node.target = defer_sum
        elif context.compiled:
            continue
        elif is_sum and _is_fresh(node.args[0], context) and _is_of(node, node.args[0]):
            node.target = sum_in_place
        elif node.target is movements.identity.default and _has_fresh_gradient(node):
            node.target = identity_then_sum_in_place
    return graph


def _is_returned(node: fx.Node, count: int) -> bool:
    """Return whether only the caller reads a sum, who completes the first `count` results."""
    if not count or info(node).val.ndim or node.args[2]:
        return False
    results: Any = node.graph.output_node().args[0]
    return (
        info(node).val.is_floating_point()
        and all(user.op == "output" for user in node.users)
        and node not in results[count:]
    )


def _is_fresh(value: Any, context: LocalContext) -> bool:
    is_apart = context.is_split and info(value).weight_inputs is not None
    return traits_of(value).makes_new and len(value.users) == 1 and not is_apart


def _is_of(node: fx.Node, value: Any) -> bool:
    """Return whether both stand in one region: what a region reads it reads again in backward."""
    return info(node).region == info(value).region


def _has_fresh_gradient(value: fx.Node) -> bool:
    return bool(value.users) and all(
        traits_of(reader).makes_new and reader.args[0] is value and value not in reader.args[1:]
        for reader in value.users
    )
