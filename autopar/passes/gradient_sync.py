"""Gradient synchronisation: what every reader of a parameter asks of its gradient, asked once.

Comes after redistribution. An `identity` movement behind a parameter says that the gradient is a
partial sum. Where all readers that give it one say so of an axis, the movement leaves the graph,
and the parameter's `sync` names the axis: the runtime sums the finished gradients of a whole step,
in buckets, while backward goes on. A movement behind an operator that reads no other values than
parameters is first lifted to these: every backward is linear, so the sum may come after it. The
operator's own gradient stays a partial sum then, over the axes in its `pending`.
"""

from __future__ import annotations

from torch import fx

from autopar.capture.origins import copied_parameter
from autopar.collectives import Movement
from autopar.layout import Placement
from autopar.passes.redistribution import insert_movement
from autopar.passes.setting import Setting
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result


def hoist_gradient_sync(graph: fx.Graph, setting: Setting) -> fx.Graph:
    """Move the summing of parameters' gradients from the graph to the end of the step."""
    for node in reversed(list(graph.nodes)):
        if axes := _identity_axes(node):
            _lift(graph, node, axes)
    for node in list(graph.nodes):
        if info(node).places is None:
            continue
        learning = [user for user in node.users if info(user).differentiable]
        asked = [set(_identity_axes(user)) for user in learning]
        shared = set.intersection(*asked) if asked else set()
        info(node).sync = tuple(sorted(shared))
        for user in learning if shared else ():
            left = tuple(axis for axis in _identity_axes(user) if axis not in shared)
            if left:
                info(user).movement = Movement("identity", left, pending=True)
            else:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    return graph


def _lift(graph: fx.Graph, identity: fx.Node, axes: tuple[str, ...]) -> None:
    """Move an `identity` from behind an operator to the parameters that this reads."""
    (value,) = identity.all_input_nodes
    is_operator = value.op == "call_function" and not is_result(value)
    if not is_operator or info(value).movement is not None or len(value.users) > 1:
        return
    inputs = tensor_inputs(value)
    learned = {node for node in inputs if info(node).differentiable}
    if any(set(axes) & set(info(node).type.layout.axes) for node in (value, *inputs)):
        return
    if not all(_has_room(node, axes, value) for node in learned):
        return
    for node in learned:
        with graph.inserting_before(value):
            moved = insert_movement(graph, node, Movement("identity", axes, pending=True))
        value.replace_input_with(node, moved)
        _lift(graph, moved, axes)  # on, to the parameter behind its cast
    info(value).wants = tuple(
        Placement(want.layout, {*want.pending, *axes}) if node in learned else want
        for node, want in zip(inputs, info(value).wants)
    )
    info(value).pending = tuple(sorted({*info(value).pending, *axes}))
    identity.replace_all_uses_with(value)
    graph.erase_node(identity)


def _identity_axes(node: fx.Node) -> tuple[str, ...]:
    """The axes over which a node asks for the sum of a gradient, and moves nothing."""
    movement = info(node).movement
    return movement.axes if movement is not None and movement.kind == "identity" else ()


def _has_room(node: fx.Node, axes: tuple[str, ...], reader: fx.Node) -> bool:
    """Whether summing the gradient of `node` instead costs no more: its other sums join it."""
    if info(node).places is None and copied_parameter(node) is None:
        return False
    others = [user for user in node.users if user is not reader]
    joined = all(set(axes) <= set(_identity_axes(user)) for user in others)
    return joined or info(node).val.numel() <= info(reader).val.numel()


def pending_axes(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """For every value, the axes over which its gradient is still to be summed."""
    pending: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        pending[node] = frozenset((*info(node).sync, *info(node).pending))
        movement = info(node).movement
        if movement is not None:
            before = pending[node.args[0]]
            pending[node] = before | frozenset(movement.axes if movement.pending else ())
    return pending
