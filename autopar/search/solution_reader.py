"""Read the solution of a cost graph back as decisions about the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.capture.captured import Captured
from autopar.layout import Placement
from autopar.search.cost_graph_builder import MeshCostGraph
from autopar.search.counted_bytes import uses_of_input
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies.node_info import info


def decide(cost_graph: MeshCostGraph, choice: Sequence[int]) -> Decisions:
    """Return where every tensor lives under `choice`, one strategy for each node."""
    captured = cost_graph.captured
    nodes = {node.name: node for node in captured.graph.nodes}
    strategies, wants, fallbacks = {}, {}, []
    for name, variable in cost_graph.operators.items():
        candidates, chosen = variable.candidates, choice[variable.number]
        assert candidates is not None
        wants[name] = [states[chosen] for states in candidates.inputs]
        if captured.rules[name] is None:
            fallbacks.append(Fallback.of(nodes[name]))
        else:
            strategies[name] = candidates.strategies[chosen]
    placeholders = {}
    for name, node in nodes.items():
        if name in cost_graph.parameters:
            placeholders[name] = cost_graph.parameters[name].chosen(choice).layout
        elif name in cost_graph.constraints.inputs:
            placeholders[name] = cost_graph.constraints.inputs[name].layout
        elif node.op == "placeholder":
            placeholders[name] = _as_read(captured, node, wants).layout
    ways: dict[tuple[str, str, int], tuple[Placement, ...]] = {}
    for name, variable in cost_graph.values.items():
        shared = variable.chosen(choice)
        for reader in nodes[name].users:
            for position in range(len(wants.get(reader.name, ()))):
                ways[name, reader.name, position] = (shared,)
        for group in cost_graph.groups.get(name, ()):
            for use in group.uses:
                placements = shared, group.chosen(choice)
                ways[use.value, use.reader, use.position] = placements
    return Decisions(
        mesh=cost_graph.mesh,
        placeholders=placeholders,
        strategies=strategies,
        fixed=cost_graph.constraints.fixed,
        fallbacks=tuple(fallbacks),
        ways=ways,
        recompute=cost_graph.constraints.recompute,
    )


def _as_read(captured: Captured, node: fx.Node, wants: dict[str, list[Placement]]) -> Placement:
    """Return where an input, a buffer or a constant lives: whole, or as all its readers want it."""
    uses = uses_of_input(captured, node) or ()
    states = {wants[use.reader][use.position] for use in uses}
    return states.pop() if len(states) == 1 else Placement.whole(info(node).val.ndim)
