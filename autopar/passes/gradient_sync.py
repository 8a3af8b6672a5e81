"""Gradient synchronisation: what every reader of a parameter asks of its gradient, asked once.

Comes after redistribution. An `identity` movement behind a parameter says that the gradient is a
partial sum. Where all readers say so of an axis, the movement leaves the graph, and the parameter's
`meta["sync"]` names the axis: the runtime sums the finished gradients of a whole step, in buckets,
while backward goes on.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx


def hoist_gradient_sync(graph: fx.Graph) -> fx.Graph:
    """Move the summing of parameters' gradients from the graph to the end of the step."""
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
