"""Decide: the solution of a cost graph, read back as decisions about the model."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.capture.captured import Captured
from autopar.capture.listing import operator_of
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.search.build import Built
from autopar.search.constraints import Constraints
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info


def decide(
    captured: Captured,
    mesh: Mesh,
    built: Built,
    choice: Sequence[int],
    constraints: Constraints,
) -> Decisions:
    """What `choice`, a strategy for each node of the cost graph, says of each tensor."""
    nodes = {node.name: node for node in captured.graph.nodes}
    strategies, wants = {}, {}
    for name, variable in built.operators.items():
        candidates, chosen = variable.candidates, choice[variable.number]
        assert candidates is not None
        if captured.rules[name] is not None:
            strategies[name] = candidates.strategies[chosen]
        wants[name] = [states[chosen] for states in candidates.inputs]
    placeholders = {}
    for name, node in nodes.items():
        if node.op != "placeholder":
            continue
        if name in built.parameters:
            variable = built.parameters[name]
            state = variable.states[choice[variable.number]]
        else:
            state = _as_read(captured, name, nodes, built, wants)
        placeholders[name] = state.layout
    ways: dict[tuple[str, str, int], tuple[Placement, ...]] = {}
    for name, variable in built.values.items():
        base = variable.states[choice[variable.number]]
        for reader in nodes[name].users:
            operator = built.operators.get(reader.name)
            if operator is not None and operator.candidates is not None:
                for position in range(len(operator.candidates.inputs)):
                    ways[name, reader.name, position] = (base,)
        for group in built.groups.get(name, ()):
            shared = group.states[choice[group.number]]
            for reading in group.readings:
                ways[reading.value, reading.reader, reading.position] = (base, shared)
    return Decisions(
        mesh=mesh,
        placeholders=placeholders,
        strategies=strategies,
        fixed={name: constraint.layout for name, constraint in constraints.values.items()},
        fallbacks=tuple(
            Fallback(name, operator_of(nodes[name]), "no rule", info(nodes[name]).source)
            for name in built.operators
            if captured.rules[name] is None
        ),
        ways=ways,
    )


def _as_read(
    captured: Captured,
    name: str,
    nodes: dict,
    built: Built,
    wants: dict[str, list[Placement]],
) -> Placement:
    """An input is cut at once if all its readers want the same piece; else it stays whole."""
    node = nodes[name]
    whole = Placement.whole(info(node).val.ndim)
    if name in captured.buffers or info(node).differentiable:
        return whole
    states = set()
    for reader in node.users:
        if reader.op == "output" or reader.name not in wants:
            return whole
        inputs = tensor_inputs(reader)
        if captured.rules[reader.name] is None:
            return whole
        states |= {wants[reader.name][i] for i, value in enumerate(inputs) if value is node}
    return states.pop() if len(states) == 1 else whole
