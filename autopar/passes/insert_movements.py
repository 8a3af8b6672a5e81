"""Redistribution: where a reader wants another layout than a value has, movements are inserted.

Comes after types. Readers that want the same share the movements, and a reader may start from any
layout in which the value already exists. Afterwards every input is in the layout that is wanted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.capture.gradients import mark_learning
from autopar.capture.marker import ANNOTATE
from autopar.capture.origins import is_made_of_parameters, moved_dtype
from autopar.collectives import Movement, Price, redistribute, redistribution_cost
from autopar.collectives.redistribution import FREE
from autopar.cost.joint_kernels import joint_call
from autopar.layout import Placement, TensorType
from autopar.mesh import Mesh
from autopar.passes.pass_setting import Setting
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result


def insert_movements(graph: fx.Graph, setting: Setting) -> fx.Graph:
    """Insert the shortest movements before every reader; drop the markers."""
    insertion = _Insertion(graph, setting.mesh, setting.price)
    for node in list(graph.nodes):
        if not _reads_tensors(node):
            continue
        inputs, moved = _inputs(node), {}
        for value, want in zip(inputs, info(node).wants):
            # What the search made readers share comes first; the rest of the way is from there.
            before: Placement | None = None
            for at in (*info(node).ways.get((value.name, want), ()), want):
                moved[value, want] = insertion.bring(node, value, at, before)
                before = at
        _rewire(node, inputs, [moved[value, want] for value, want in zip(inputs, info(node).wants)])
    for node in reversed(graph.nodes):
        if node.target is ANNOTATE:
            graph.erase_node(node)
    return graph


class _Insertion:
    """The versions of every value that exist so far, by placement, and those that are wanted.

    A marker is another name for the value that it marks: its readers start from that value, those
    that want another layout than the marker's by way of the marker's.
    """

    def __init__(self, graph: fx.Graph, mesh: Mesh, price: Price) -> None:
        self.graph, self.mesh, self.price = graph, mesh, price
        self.versions: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.wanted: dict[fx.Node, set[Placement]] = {}
        self.learned: set[tuple[fx.Node, Placement]] = set()  # for whom there is a gradient
        for node in graph.nodes:
            if _reads_tensors(node):
                for value, want in zip(_inputs(node), info(node).wants):
                    self._expect(value, want, info(node).learns)

    def bring(
        self, reader: fx.Node, value: fx.Node, want: Placement, before: Placement | None = None
    ) -> fx.Node:
        """The node that holds `value` as wanted, made from `before` or, if that does not exist,
        from the cheapest version that does."""
        own = Placement(info(value).type.layout)
        if value.target is ANNOTATE:
            (marked,) = value.all_input_nodes
            if want.layout == own.layout:
                return self.bring(reader, marked, want)
            if value not in self.versions:
                self.versions[value] = {own: self.bring(reader, marked, own)}
        versions = self.versions.setdefault(value, {own: value})
        if want in versions:
            return versions[want]
        others = self.wanted[value] - {want}
        if want.pending and any(other.layout == want.layout for other in others):
            self.bring(reader, value, Placement(want.layout))  # others want it too: it moves once
        clear = [at for at in versions if not at.pending]
        at = min(clear, key=lambda at: (at is not before, self._cost(value, at, want)))
        node = versions[at]
        path = self._path(value, at, want)
        for movement in path:
            at = movement.place(at)
            if at not in versions:
                with self.graph.inserting_before(reader):
                    versions[at] = insert_movement(self.graph, node, movement)
                    info(versions[at]).alone = len(path) == 1
            node = versions[at]
            known = info(reader)
            about = {"module": known.module, "source": known.source, "checkpoint": known.checkpoint}
            info(node).update(**about)
        return node

    def _path(self, value: fx.Node, at: Placement, want: Placement) -> tuple[Movement, ...]:
        """The cheapest movements. Over the axes on which a parameter is stored whole its gradient
        is summed last: then that need not wait in the program."""
        start, about = at.layout, self._about(value, want)
        late = tuple(axis for axis in self.mesh if axis in want.pending and axis not in start.axes)
        if late and info(value).differentiable and is_made_of_parameters(value):
            rest = Placement(want.layout, set(want.pending) - set(late))
            path = redistribute(start, rest, *about)
            if not any(set(movement.axes) & set(late) for movement in path):
                return (Movement("identity", late, pending=True), *path)
        return redistribute(start, want, *about)

    def _expect(self, value: fx.Node, want: Placement, learns: bool) -> None:
        if value.target is ANNOTATE:
            own = Placement(info(value).type.layout)
            is_own = want.layout == own.layout
            self._expect(value.all_input_nodes[0], want if is_own else own, learns)
            if is_own:
                return
        self.wanted.setdefault(value, set()).add(want)
        self.learned |= {(value, want)} if learns else set()

    def _cost(self, value: fx.Node, at: Placement, want: Placement) -> float:
        return redistribution_cost(at.layout, want, *self._about(value, want))

    def _about(
        self, value: fx.Node, want: Placement
    ) -> tuple[tuple[int, ...], int, Mesh, Price, bool, bool]:
        type_, differentiable = info(value).type, info(value).differentiable
        learns = (value, want) in self.learned
        return type_.shape, type_.dtype.itemsize, self.mesh, self.price, differentiable, learns


def insert_movement(graph: fx.Graph, value: fx.Node, movement: Movement) -> fx.Node:
    """One movement of `value` at the graph's insertion point."""
    operator = getattr(torch.ops.autopar, movement.kind).default
    node = graph.create_node("call_function", operator, (value,), name=movement.kind)
    before = info(value).type
    info(node).update(
        val=info(value).val,
        type=TensorType(before.shape, before.dtype, movement.apply(before.layout)),
        wants=(Placement(before.layout),),
        movement=movement,
        source=info(value).source,
        module=info(value).module,
        differentiable=info(value).differentiable,
        learns=info(value).learns,
        on_host=info(value).on_host,
    )
    return node


def measure_movements(graph: fx.Graph, setting: Setting) -> fx.Graph:
    """Write on every movement how many bytes it moves, the larger of a piece before and after, and
    whether a gradient goes back through it in a step."""
    mark_learning(graph, setting.captured.differentiated)
    for node in graph.nodes:
        if info(node).movement is not None:
            dtype, types = moved_dtype(node), (info(node.args[0]).type, info(node).type)
            sizes = [replace(type_, dtype=dtype).local_bytes(setting.mesh) for type_ in types]
            kinds = {info(node).movement.kind, info(node).movement.backward}  # type: ignore[union-attr]
            info(node).bytes = 0 if kinds <= {*FREE} else max(sizes)
        elif info(node).joint is not None:
            inside = (joint_call(*call, setting.mesh) for call in info(node).calls)
            info(node).bytes = int(
                sum(size for own in filter(None, inside) for _, size in own.traffic.forward)
            )
    return graph


def _reads_tensors(node: fx.Node) -> bool:
    """Whether a node wants its inputs in certain layouts."""
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
