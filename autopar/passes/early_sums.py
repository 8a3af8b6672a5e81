"""Early sums: numbers that hang on inputs alone are summed before anybody waits for them.

For graphs of one rank that run eagerly, after `localize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.collectives.eager_movements import finish_sum, start_sum
from autopar.mesh import Mesh
from autopar.passes.flow import ancestors
from autopar.passes.pass_setting import LocalSetting
from autopar.strategies import localize_arguments
from autopar.strategies.node_info import info

own = torch.ops.autopar
SMALL_SUM, SMALL_INPUT = 2**10, 2**20  # elements


def settle_small_sums(graph: fx.Graph, setting: LocalSetting) -> fx.Graph:
    """Small sums that hang on inputs alone: nobody waits for them in the middle of the program.

    A rank that has the whole inputs computes the sum itself, from further placeholders, of origin
    "whole"; else it is started first, and waited for at its first use.
    """
    inputs: dict[fx.Node, fx.Node] = {}
    everywhere = {} if setting.whole is None else {node.name: node for node in setting.whole.nodes}
    for node in list(graph.nodes):
        if node.target is not own.all_reduce.default or info(node).differentiable:
            continue
        value: Any = node.args[0]
        before = _calls_behind(value)
        if before is None or info(value).val.numel() > SMALL_SUM:
            continue
        if info(node).type.layout.is_replicated and _same_on_whole(
            before, everywhere, setting.mesh
        ):
            with graph.inserting_before(node):
                calls = [everywhere[call.name] for call in before]
                total = _on_whole(graph, calls, inputs)[everywhere[value.name]]
            node.replace_all_uses_with(total)
            graph.erase_node(node)
            for dead in reversed(before):
                if not dead.users:
                    graph.erase_node(dead)
        else:
            with graph.inserting_after(_last_placeholder(graph)):
                started = graph.call_function(start_sum, node.args)
            for earlier in before:
                started.prepend(earlier)
                info(earlier).region = None
            node.target, node.args, node.kwargs = finish_sum, (started,), {}
    return graph


def _calls_behind(value: fx.Node) -> list[fx.Node] | None:
    """The calls behind `value` in order; None if a movement or a gradient is among them."""
    found = ancestors([value])
    calls = [node for node in value.graph.nodes if node in found and node.op == "call_function"]
    if any(info(node).movement is not None or info(node).differentiable for node in calls):
        return None
    return calls


def _same_on_whole(calls: list[fx.Node], everywhere: dict[str, fx.Node], mesh: Mesh | None) -> bool:
    """Whether the program of all ranks runs on whole inputs as it is, and these are small.

    Every rank finds the same, whatever its own calls have become: all sum, or none.
    """
    sources = {node for call in calls for node in call.all_input_nodes} - {*calls}
    if mesh is None or any(
        info(node).origin[0] != "input" or info(node).val.numel() > SMALL_INPUT for node in sources
    ):
        return False
    others = [everywhere.get(call.name) for call in calls]
    return all(other is not None and _same_on_ranks(other, mesh) for other in others)


def _same_on_ranks(call: fx.Node, mesh: Mesh) -> bool:
    """Whether no argument of a call depends on how it is cut."""
    whole = str((call.args, call.kwargs))
    is_plain = info(call).start_of is None and info(call).joint is None
    return is_plain and all(
        str(localize_arguments(call, info(call).type, mesh, rank)) == whole
        for rank in range(mesh.size)
    )


def _on_whole(
    graph: fx.Graph, calls: list[fx.Node], inputs: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The same calls on whole inputs."""
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
