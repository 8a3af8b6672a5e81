"""Movements between the layout that a value has and those that its readers want.

Runs after `assign_types`. Readers that want the same layout share the movements. A reader may start
from any layout in which the value already exists. Afterwards every input has the wanted layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import fx

from autopar.capture.gradients import mark_learning
from autopar.capture.marker import ANNOTATE
from autopar.capture.origins import is_made_of_parameters, made_without_inputs, moved_dtype
from autopar.collectives import Movement, redistribute, redistribution_cost
from autopar.collectives.redistribution import FREE
from autopar.cost.joint_kernels import price_joint_call
from autopar.layout import Layout, Placement
from autopar.passes.pass_context import RewriteContext
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info, name_beside
from autopar.strategies.results import is_result
from autopar.tensor_type import TensorType

T = TypeVar("T")


def insert_movements(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Insert the shortest movements before every reader; drop the markers."""
    insertion = _Insertion(graph, context)
    for node in list(graph.nodes):
        if not _reads_tensors(node):
            continue
        inputs, moved = _inputs(node), {}
        for value, want in zip(inputs, info(node).wants):
            # The placements that readers share come first, then the rest of the way.
            before: Placement | None = None
            for at in (*info(node).ways.get((value.name, want), ()), want):
                moved[value, want] = insertion.bring(node, value, at, before)
                before = at
        node.meta.pop("ways", None)  # which names values
        _rewire(node, inputs, [moved[value, want] for value, want in zip(inputs, info(node).wants)])
    for node in reversed(graph.nodes):
        if node.target is ANNOTATE:
            graph.erase_node(node)
    return graph


class _Insertion:
    """Hold the versions of every value that exist so far, by placement, and those wanted.

    A marker is another name for the value that it marks: its readers start from that value, those
    that want another layout than the marker's by way of the marker's."""

    def __init__(self, graph: fx.Graph, context: RewriteContext) -> None:
        self.graph, self.mesh, self.price = graph, context.mesh, context.price
        self.of_weights = made_without_inputs(graph, context.captured)
        self.versions: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.wanted: dict[fx.Node, set[Placement]] = {}
        self.learned: set[tuple[fx.Node, Placement]] = set()  # for whom there is a gradient
        for node in graph.nodes:
            if _reads_tensors(node):
                for value, want in zip(_inputs(node), info(node).wants):
                    self._expect(value, want, learns=info(node).learns)

    def bring(
        self, reader: fx.Node, value: fx.Node, want: Placement, preferred: Placement | None = None
    ) -> fx.Node:
        """Return the node that holds `value` as wanted, from `preferred` or the nearest version."""
        current = Placement(info(value).type.layout)
        if value.target is ANNOTATE:
            (marked,) = value.all_input_nodes
            if want.layout == current.layout:
                return self.bring(reader, marked, want)
            if value not in self.versions:
                self.versions[value] = {current: self.bring(reader, marked, current)}
        versions = self.versions.setdefault(value, {current: value})
        if want in versions:
            return versions[want]
        other_wants = self.wanted[value] - {want}
        if want.pending and any(other.layout == want.layout for other in other_wants):
            self.bring(reader, value, Placement(want.layout))  # others want it too: it moves once
        complete = [at for at in versions if not at.pending]
        at = min(complete, key=lambda at: (at is not preferred, self._cost(value, at, want)))
        node = versions[at]
        path = self._path(value, at, want)
        for movement in path:
            at = movement.place(at)
            if at not in versions:
                with self.graph.inserting_before(reader):
                    versions[at] = insert_movement(self.graph, node, movement, reader)
                    info(versions[at]).alone = len(path) == 1
            node = versions[at]
            known = info(reader)
            info(node).update(module=known.module, source=known.source, checkpoint=known.checkpoint)
        return node

    def _path(self, value: fx.Node, at: Placement, want: Placement) -> tuple[Movement, ...]:
        """Return the cheapest movements from `at` to `want`.
        A parameter's gradient is summed last over axes on which it is whole: after the program."""
        start = at.layout
        sums = set(want.pending) - set(start.axes)
        deferred_axes = tuple(axis for axis in self.mesh if axis in sums)
        is_summed_last = value in self.of_weights or is_made_of_parameters(value)
        if deferred_axes and info(value).differentiable and is_summed_last:
            rest = Placement(want.layout, set(want.pending) - set(deferred_axes))
            path = self._route(redistribute, value, want, start, rest)
            if not any(set(movement.axes) & set(deferred_axes) for movement in path):
                return (Movement("identity", deferred_axes, pending=True), *path)
        return self._route(redistribute, value, want, start, want)

    def _expect(self, value: fx.Node, want: Placement, *, learns: bool) -> None:
        if value.target is ANNOTATE:
            marked_at = Placement(info(value).type.layout)
            is_same = want.layout == marked_at.layout
            self._expect(value.all_input_nodes[0], want if is_same else marked_at, learns=learns)
            if is_same:
                return
        self.wanted.setdefault(value, set()).add(want)
        self.learned |= {(value, want)} if learns else set()

    def _cost(self, value: fx.Node, at: Placement, want: Placement) -> float:
        return self._route(redistribution_cost, value, want, at.layout, want)

    def _route(
        self, find: Callable[..., T], value: fx.Node, want: Placement, start: Layout, end: Placement
    ) -> T:
        """Find the cheapest way from `start` to `end`, as a part of the way to `want`."""
        type_, back = info(value).type, info(value).differentiable
        size, learns = type_.dtype.itemsize, (value, want) in self.learned
        return find(start, end, type_.shape, size, self.mesh, self.price, back, learns)


def insert_movement(
    graph: fx.Graph, value: fx.Node, movement: Movement, reader: fx.Node
) -> fx.Node:
    """Insert one movement of `value` before the first of its readers, which it is named after."""
    operator = getattr(torch.ops.autopar, movement.kind).default
    taken = {node.name for node in _movements_before(reader)}
    name, place = name_beside(reader, movement.kind, taken)
    node = graph.create_node("call_function", operator, (value,), name=name)
    node.name = name  # also where an earlier node was called so
    previous = info(value).type
    info(node).update(
        val=info(value).val,
        type=TensorType(previous.shape, previous.dtype, movement.apply(previous.layout)),
        wants=(Placement(previous.layout),),
        movement=movement,
        source=info(value).source,
        module=info(value).module,
        differentiable=info(value).differentiable,
        learns=info(value).learns,
        on_host=info(value).on_host,
        block=place,
    )
    return node


def _movements_before(reader: fx.Node) -> Iterator[fx.Node]:
    node = reader.prev
    while info(node).movement is not None:
        yield node
        node = node.prev


def measure_movements(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Write on every movement the bytes it moves, and whether a gradient goes back through it.
    The bytes are those of the larger piece, before or after."""
    mark_learning(graph, context.captured.differentiated)
    for node in graph.nodes:
        if info(node).movement is not None:
            dtype, types = moved_dtype(node), (info(node.args[0]).type, info(node).type)
            sizes = [replace(type_, dtype=dtype).local_bytes(context.mesh) for type_ in types]
            kinds = {info(node).movement.kind, info(node).movement.backward}  # type: ignore[union-attr]
            info(node).bytes = 0 if kinds <= {*FREE} else max(sizes)
        elif info(node).joint is not None:
            volumes = (price_joint_call(*call, context.mesh) for call in info(node).calls)
            info(node).bytes = int(
                sum(size for volume in filter(None, volumes) for _, size in volume.traffic.forward)
            )
    return graph


def _reads_tensors(node: fx.Node) -> bool:
    """Return whether a node wants its inputs in certain layouts."""
    is_reader = node.op in ("call_function", "output")
    return is_reader and node.target is not ANNOTATE and not is_result(node)


def _inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    return node.args[0] if node.op == "output" else tensor_inputs(node)  # type: ignore[return-value]


def _rewire(reader: fx.Node, before: tuple[fx.Node, ...], after: list[fx.Node]) -> None:
    """Replace the tensor inputs of `reader` one by one: one value may be wanted in two layouts."""
    replacements = iter(after)
    remaining = list(before)

    def swap(value: fx.Node) -> fx.Node:
        assert value is remaining.pop(0)
        return next(replacements)

    reader.args = fx.map_arg(reader.args, swap)
    reader.kwargs = fx.map_arg(reader.kwargs, swap)
