"""Decide: the solution of a cost graph, read back as decisions about the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.capture.captured import Captured
from autopar.layout import Placement
from autopar.search.cost_graph_builder import MeshCostGraph
from autopar.search.counted_bytes import uses_of_input
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies.node_info import info


def decide(built: MeshCostGraph, choice: Sequence[int]) -> Decisions:
    """What `choice`, a strategy for each node of the cost graph, says of each tensor."""
    captured = built.captured
    nodes = {node.name: node for node in captured.graph.nodes}
    strategies, wants, fallbacks = {}, {}, []
    for name, variable in built.operators.items():
        candidates, chosen = variable.candidates, choice[variable.number]
        assert candidates is not None
        wants[name] = [states[chosen] for states in candidates.inputs]
        if captured.rules[name] is None:
            fallbacks.append(Fallback.of(nodes[name]))
        else:
            strategies[name] = candidates.strategies[chosen]
    placeholders = {}
    for name, node in nodes.items():
        if name in built.parameters:
            placeholders[name] = built.parameters[name].chosen(choice).layout
        elif node.op == "placeholder":
            placeholders[name] = _as_read(captured, node, wants).layout
    ways: dict[tuple[str, str, int], tuple[Placement, ...]] = {}
    for name, variable in built.values.items():
        base = variable.chosen(choice)
        for reader in nodes[name].users:
            for position in range(len(wants.get(reader.name, ()))):
                ways[name, reader.name, position] = (base,)
        for group in built.groups.get(name, ()):
            for reading in group.readings:
                way = base, group.chosen(choice)
                ways[reading.value, reading.reader, reading.position] = way
    return Decisions(
        mesh=built.mesh,
        placeholders=placeholders,
        strategies=strategies,
        fixed=built.constraints.fixed,
        fallbacks=tuple(fallbacks),
        ways=ways,
        recompute=built.constraints.recompute,
    )


def _as_read(captured: Captured, node: fx.Node, wants: dict[str, list[Placement]]) -> Placement:
    """Where an input, a buffer or a constant is kept: whole, or as its readers want it."""
    readings = uses_of_input(captured, node) or ()
    states = {wants[one.reader][one.position] for one in readings}
    return states.pop() if len(states) == 1 else Placement.whole(info(node).val.ndim)
