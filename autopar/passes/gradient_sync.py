"""Gradient synchronisation: what every reader of a parameter asks of its gradient, asked once.

Comes after redistribution. An `identity` movement behind a parameter says that the gradient is a
partial sum. Where all readers say so of an axis, the movement leaves the graph, and the parameter's
`meta["sync"]` names the axis: the runtime sums the finished gradients of a whole step, in buckets,
while backward goes on. A movement behind an operator that reads no other values than parameters is
first lifted to these: every backward is linear, so the sum may come after it. The operator's own
gradient stays a partial sum then, over the axes in its `meta["pending"]`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.passes.redistribution import insert_movement
from autopar.strategies import tensor_inputs
from autopar.strategies.results import is_result


def hoist_gradient_sync(graph: fx.Graph) -> fx.Graph:
    """Move the summing of parameters' gradients from the graph to the end of the step."""
    for node in reversed(list(graph.nodes)):
        if "movement" in node.meta and node.meta["movement"].kind == "identity":
            _lift(graph, node)
    for node in list(graph.nodes):
        if node.op != "placeholder" or node.meta["origin"][0] != "parameter":
            continue
        movements = [user.meta.get("movement") for user in node.users]
        if movements and all(m is not None and m.kind == "identity" for m in movements):
            shared = set.intersection(*(set(movement.axes) for movement in movements))
        else:
            shared = set()
        node.meta["sync"] = tuple(sorted(shared))
        for user in list(node.users) if shared else ():
            movement = user.meta["movement"]
            left = tuple(axis for axis in movement.axes if axis not in shared)
            if left:
                user.meta["movement"] = replace(movement, axes=left)
            else:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    return graph


def _lift(graph: fx.Graph, identity: fx.Node) -> None:
    """Move an `identity` from behind an operator to the parameters that this reads."""
    (value,), movement = identity.all_input_nodes, identity.meta["movement"]
    is_operator = value.op == "call_function" and not is_result(value)
    if not is_operator or "movement" in value.meta or len(value.users) > 1:
        return
    inputs = tensor_inputs(value)
    learned = {node for node in inputs if node.meta["differentiable"]}
    if any(set(movement.axes) & set(node.meta["type"].layout.axes) for node in (value, *inputs)):
        return
    if not all(_has_room(node, movement.axes, value) for node in learned):
        return
    for node in learned:
        with graph.inserting_before(value):
            moved = insert_movement(graph, node, movement)
        value.replace_input_with(node, moved)
    value.meta["wants"] = tuple(
        (layout, tuple(sorted({*pending, *movement.axes})) if node in learned else pending)
        for node, (layout, pending) in zip(inputs, value.meta["wants"])
    )
    value.meta["pending"] = tuple(sorted({*value.meta.get("pending", ()), *movement.axes}))
    identity.replace_all_uses_with(value)
    graph.erase_node(identity)


def _has_room(node: fx.Node, axes: tuple[str, ...], reader: fx.Node) -> bool:
    """Whether summing the gradient of `node` instead costs no more: its other sums join it."""
    if node.op != "placeholder" or node.meta["origin"][0] != "parameter":
        return False
    others = [user.meta.get("movement") for user in node.users if user is not reader]
    joined = all(m is not None and m.kind == "identity" and set(axes) <= {*m.axes} for m in others)
    return joined or node.meta["val"].numel() <= reader.meta["val"].numel()
