"""Gradient synchronisation: the gradient sums that readers of a parameter need, once for each step.

Runs after `insert_movements`. An `identity` movement behind a parameter says that the gradient is a
partial sum. It leaves the graph, and the parameter's `sync` names the axes: the runtime sums the
finished gradients of a step in buckets, while backward goes on. Other readers may give a whole
gradient, as a penalty on weights does; an inserted movement makes it one rank's term of that sum.
A movement behind operators that follow from parameters alone is first lifted to these: every
backward is linear, so the sum may come after it. The gradients of these operators stay partial sums
then, over the axes in their `pending`.
"""

from __future__ import annotations

from torch import fx

from autopar.capture.origins import copied_parameter, made_without_inputs
from autopar.collectives import Movement
from autopar.layout import Placement
from autopar.passes.insert_movements import insert_movement
from autopar.passes.pass_context import RewriteContext
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result, values_of

Axes = tuple[str, ...]


def hoist_gradient_sync(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Move the summing of parameters' gradients from the graph to the end of the step."""
    of_weights = made_without_inputs(graph, context.captured)
    for node in reversed(list(graph.nodes)):
        values = values_of(node)
        summed = {axis for value in values for axis in _reader_axes(value)}
        axes = tuple(axis for axis in context.mesh if axis in summed)
        if not axes or is_result(node):
            continue
        if info(node).places is not None:
            info(node).sync = tuple(sorted(axes))
        elif not _may_lift(node, axes, reads_no_input=node in of_weights):
            continue
        for value in values:
            _leave_pending(graph, value, axes)
        if info(node).places is None:
            _lift(graph, node, axes)
    return graph


def _reader_axes(value: fx.Node) -> set[str]:
    """Return the axes over which some reader sums a value's gradient."""
    return {axis for reader in value.users for axis in _summed_axes(reader)}


def _summed_axes(node: fx.Node) -> Axes:
    """Return the axes over which a node sums the gradient of what it reads, and moves nothing."""
    movement = info(node).movement
    is_sum = movement is not None and movement.is_sum_back and info(node).differentiable
    return movement.axes if is_sum else ()  # type: ignore[union-attr]


def _leave_pending(graph: fx.Graph, value: fx.Node, axes: Axes) -> None:
    """Have every reader give the gradient of a value as a partial sum over all of `axes`."""
    for reader in [user for user in value.users if info(user).differentiable]:
        read, known = value, info(reader)
        if unsummed := tuple(axis for axis in axes if axis not in _summed_axes(reader)):
            with graph.inserting_before(reader):
                read = insert_movement(graph, value, Movement("identity", unsummed), reader)
            info(read).update(module=known.module, source=known.source, checkpoint=known.checkpoint)
        if _summed_axes(reader):
            reader.replace_all_uses_with(read)
            graph.erase_node(reader)
        else:
            reader.replace_input_with(value, read)


def _may_lift(operator: fx.Node, axes: Axes, *, reads_no_input: bool) -> bool:
    """Return whether the gradients of what an operator reads are summed instead of those of its
    results: always if it computes with parameters alone, else at no more cost."""
    if operator.op != "call_function" or info(operator).movement is not None:
        return False
    inputs = tensor_inputs(operator)
    types = [type_ for node in (operator, *inputs) for type_ in info(node).types]
    if any(set(axes) & set(type_.layout.axes) for type_ in types):
        return False
    learned = [node for node in inputs if info(node).differentiable]
    return reads_no_input or all(_has_room(node, axes, operator) for node in learned)


def _has_room(node: fx.Node, axes: Axes, reader: fx.Node) -> bool:
    """Return whether the gradient of `node` is no larger than its reader's, or is summed anyway."""
    if info(node).places is None and copied_parameter(node) is None:
        return False
    others = [user for user in node.users if user is not reader and info(user).differentiable]
    is_summed = not others or any(set(axes) <= set(_summed_axes(user)) for user in others)
    return is_summed or info(node).val.numel() <= sum(v.numel() for v in info(reader).values)


def _lift(graph: fx.Graph, value: fx.Node, axes: Axes) -> None:
    """Sum the gradients of what an operator reads; its output's stays a partial sum."""
    inputs = tensor_inputs(value)
    learned = {node for node in inputs if info(node).differentiable}
    movement = Movement("identity", axes, pending=True)
    for node in [node for node in dict.fromkeys(inputs) if node in learned]:
        with graph.inserting_before(value):
            moved = insert_movement(graph, node, movement, value)
        value.replace_input_with(node, moved)
    info(value).wants = tuple(
        Placement(want.layout, {*want.pending, *axes}) if node in learned else want
        for node, want in zip(inputs, info(value).wants)
    )
    for node in values_of(value):
        info(node).pending = tuple(sorted({*info(node).pending, *axes}))


def pending_axes(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Return for every value the axes over which its gradient is still to be summed."""
    pending: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        pending[node] = frozenset((*info(node).sync, *info(node).pending))
        movement = info(node).movement
        if movement is not None:
            unsummed = pending[node.args[0]].difference(movement.axes)
            pending[node] = unsummed.union(movement.axes if movement.pending else ())
    return pending
