"""Recompute marks: which operators run again in backward, and which values are dropped until then.

Runs last in `PASSES`. A region that is fully recomputed keeps only what it reads: its backward
begins with its forward, up to the last operator that keeps something of it. Selective recomputation
drops values that cheap operators make again from others that are kept anyway, where
backward first reads them; by a policy, all are dropped that it does not save. A region may also
offload what it keeps: in pieces to other ranks, or to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.capture.origins import gathered_parameter, is_made_of_parameters
from autopar.capture.randomness import is_random
from autopar.capture.regions import runs
from autopar.cost.policy_regions import calls_made_again
from autopar.cost.saved_tensors import offload_axes, saved_by, saved_throughout
from autopar.cost.value_storage import is_read_outside, source, storage
from autopar.mesh import Mesh
from autopar.passes.pass_context import RewriteContext
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.registry import is_view
from autopar.strategies.results import has_results, is_result, maker, result_index

SMALL = 1 / 16  # of the bytes of the largest value that is made again: less is kept


def mark_recomputed(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Mark the nodes of every region with what runs again, and clear the marks of all others."""
    for node in graph.nodes:
        for fact in ("region", "remade", "dropped", "away"):
            node.meta.pop(fact, None)
    by_region, numbers = context.decisions.recompute, dict[str, int]()
    if not by_region:
        return graph
    for name, nodes in runs(graph, by_region, is_made_of_parameters):
        number = numbers[name] = numbers.get(name, -1) + 1
        region = RecomputeRegion(
            name, by_region[name], number, any(map(is_random, nodes)), info(nodes[-1]).count
        )
        for node in nodes:
            info(node).region = region
        if region.how.kind is not None:
            _MARKS[region.how.kind](nodes, context.mesh)
        if region.how.keep != "device":
            _mark_away(nodes, region, context.mesh)
    return graph


def _mark_full(nodes: Sequence[fx.Node], mesh: Mesh) -> None:
    members, last_kept = set(nodes), -1
    for index, node in enumerate(nodes):
        if any(key[0] in members for key in saved_by(node, mesh)):
            last_kept = index
    for node in nodes[: last_kept + 1]:
        # A parameter that is gathered is gathered for backward anyway.
        info(node).remade = gathered_parameter(node) is None


def _mark_selective(nodes: Sequence[fx.Node], mesh: Mesh) -> None:
    members = set(nodes)
    sizes: dict[fx.Node, float] = {}
    for node in nodes:
        for (value, place), size in saved_by(node, mesh).items():
            if isinstance(place, int):
                sizes[value] = max(size, sizes.get(value, 0.0))
    saved = sizes.keys()
    # Values that are there in backward, or can be made of such at little cost.
    is_cheap: dict[fx.Node, bool] = {}
    for node in nodes:
        if not is_result(node) and _is_cheap(node):
            is_cheap[node] = all(
                value.op == "placeholder" or value in saved or is_cheap.get(value, False)
                for value in map(source, node.all_input_nodes)
            )
    possible = [n for n in saved & members if is_cheap.get(n) and not is_read_outside(n, members)]
    threshold = SMALL * max((sizes[node] for node in possible), default=0.0)
    dropped = {node for node in possible if sizes[node] >= threshold}
    to_remake = list(dropped)
    for node in dropped:
        info(node).dropped = True
    while to_remake:
        node = to_remake.pop()
        if not info(node).remade:
            info(node).remade = True
            sources = map(source, node.all_input_nodes)
            to_remake += [v for v in sources if v in members and (v not in saved or v in dropped)]


def _mark_by_policy(nodes: Sequence[fx.Node], mesh: Mesh) -> None:
    saved = {value for node in nodes for value, at in saved_by(node, mesh) if isinstance(at, int)}
    for node in calls_made_again(nodes, saved):
        info(node).update(remade=True, dropped=True)


_MARKS: Mapping[str, Callable[[Sequence[fx.Node], Mesh], None]] = {
    "full": _mark_full,
    "selective": _mark_selective,
    "policy": _mark_by_policy,
}


def _mark_away(nodes: Sequence[fx.Node], region: RecomputeRegion, mesh: Mesh) -> None:
    """Write on values, and on views of them that a region reads, that it keeps them elsewhere."""
    members = set(nodes)
    lasting_keys = {key for node in nodes for key in saved_throughout(node, region, mesh)}
    for value in dict.fromkeys(v for node in nodes for v in (*node.all_input_nodes, node)):
        base = storage(value)
        if (value in members and base is not value) or has_results(value):
            continue
        key = maker(base), result_index(base)
        axes = offload_axes(key, region.how.keep, mesh) if key in lasting_keys else None
        if axes is not None:
            for holder in {value, base}:
                info(holder).away = {**info(holder).away, region: axes}


def stay_received(graph: fx.Graph) -> None:
    """Clear the offload marks of received values, which a stage holds anyway."""
    for node in graph.nodes:
        if info(node).away and storage(node).op == "placeholder":
            info(node).away = {}


def _is_cheap(node: fx.Node) -> bool:
    """Return whether an operator does little more than read its inputs."""
    calls: Any = info(node).calls
    if not calls or info(node).movement is not None or info(node).start_of is not None:
        return False
    if info(node).joint is not None:
        return False
    return not is_view(node) and all(facts.is_cheap for facts, _ in calls)
