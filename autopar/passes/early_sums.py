"""Early sums: sums that depend on inputs alone are started before anything waits for them.

For graphs of one rank that run eagerly, after `localize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.collectives.eager_movements import finish_sum, start_sum
from autopar.mesh import Mesh
from autopar.passes.flow import ancestors
from autopar.passes.pass_context import LocalContext
from autopar.strategies import localize_arguments
from autopar.strategies.node_info import info

movements = torch.ops.autopar
SMALL_SUM, SMALL_INPUT = 2**10, 2**20  # elements


def settle_small_sums(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Compute or start small sums that depend on inputs alone at the start of the program.

    A rank that has the whole inputs computes the sum itself, from further placeholders of origin
    "whole". Otherwise the sum is started first, and waited for at its first use."""
    inputs: dict[fx.Node, fx.Node] = {}
    global_nodes = () if context.global_graph is None else context.global_graph.nodes
    all_ranks = {node.name: node for node in global_nodes}
    for node in list(graph.nodes):
        if node.target is not movements.all_reduce.default or info(node).differentiable:
            continue
        value: Any = node.args[0]
        local_calls = _calls_behind(value)
        if local_calls is None or info(value).val.numel() > SMALL_SUM:
            continue
        if info(node).type.layout.is_replicated and _same_on_whole(
            local_calls, all_ranks, context.mesh
        ):
            with graph.inserting_before(node):
                calls = [all_ranks[call.name] for call in local_calls]
                total = _on_whole(graph, calls, inputs)[all_ranks[value.name]]
            node.replace_all_uses_with(total)
            graph.erase_node(node)
            for dead in reversed(local_calls):
                if not dead.users:
                    graph.erase_node(dead)
        else:
            with graph.inserting_after(_last_placeholder(graph)):
                started = graph.call_function(start_sum, node.args)
            for earlier in local_calls:
                started.prepend(earlier)
                info(earlier).region = None
            node.target, node.args, node.kwargs = finish_sum, (started,), {}
    return graph


def _calls_behind(value: fx.Node) -> list[fx.Node] | None:
    """Return the calls behind `value` in order; `None` with a movement or gradient among them."""
    sources = ancestors([value])
    calls = [node for node in value.graph.nodes if node in sources and node.op == "call_function"]
    if any(info(node).movement is not None or info(node).differentiable for node in calls):
        return None
    return calls


def _same_on_whole(calls: list[fx.Node], all_ranks: dict[str, fx.Node], mesh: Mesh | None) -> bool:
    """Return whether the program of all ranks makes these calls unchanged on small whole inputs.
    Every rank finds the same answer, whatever its own calls have become: all sum, or none."""
    sources = {node for call in calls for node in call.all_input_nodes} - {*calls}
    if mesh is None or any(
        info(node).origin[0] != "input" or info(node).val.numel() > SMALL_INPUT for node in sources
    ):
        return False
    global_calls = [all_ranks.get(call.name) for call in calls]
    return all(call is not None and _same_on_ranks(call, mesh) for call in global_calls)


def _same_on_ranks(call: fx.Node, mesh: Mesh) -> bool:
    """Return whether no argument of a call depends on how it is cut."""
    global_arguments = str((call.args, call.kwargs))
    is_plain = info(call).start_of is None and info(call).joint is None
    return is_plain and all(
        str(localize_arguments(call, info(call).type, mesh, rank)) == global_arguments
        for rank in range(mesh.size)
    )


def _on_whole(
    graph: fx.Graph, calls: list[fx.Node], inputs: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy the calls, to read whole inputs."""
    copies: dict[fx.Node, fx.Node] = {}
    for source in {node: None for call in calls for node in call.all_input_nodes}:
        if source not in calls and source not in inputs:
            with graph.inserting_after(_last_placeholder(graph)):
                inputs[source] = graph.placeholder(f"whole_{source.name}")
            inputs[source].meta = {**source.meta, "origin": ("whole", source.name)}
    for call in calls:
        copies[call] = graph.node_copy(call, lambda n: copies.get(n) or inputs[n])
        copies[call].meta = {**call.meta, "region": None}
    return copies


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return [node for node in graph.nodes if node.op == "placeholder"][-1]
