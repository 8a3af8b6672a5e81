"""Redistribution: where a reader wants another layout than a value has, movements are inserted.

Comes after types. Readers that want the same share the movements, and a reader may start from any
layout in which the value already exists. Afterwards every input is in the layout that is wanted.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.marker import ANNOTATE
from autopar.collectives import Movement, Price, redistribute, redistribution_cost
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.strategies import tensor_inputs

State = tuple[Layout, tuple[str, ...]]  # a layout, and the axes on which it is pending


def insert_movements(graph: fx.Graph, mesh: Mesh, price: Price) -> fx.Graph:
    """Insert the shortest movements before every reader; drop the markers."""
    versions: dict[fx.Node, dict[State, fx.Node]] = {}
    for node in list(graph.nodes):
        if "type" in node.meta:
            versions[node] = {(node.meta["type"].layout, ()): node}
        if node.op not in ("call_function", "output"):
            continue
        inputs = node.args[0] if node.op == "output" else tensor_inputs(node)
        moved: dict[tuple[fx.Node, State], fx.Node] = {}
        for value, want in zip(inputs, node.meta["wants"]):
            # What the search made readers share comes first; the rest of the way is from there.
            for state in (*node.meta.get("ways", {}).get((value.name, want), ()), want):
                moved[value, want] = _bring(graph, node, value, state, versions[value], mesh, price)
        _rewire(node, inputs, [moved[value, want] for value, want in zip(inputs, node.meta["wants"])])
    for node in list(graph.nodes):
        if node.target is ANNOTATE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


def _bring(
    graph: fx.Graph,
    reader: fx.Node,
    value: fx.Node,
    want: State,
    versions: dict[State, fx.Node],
    mesh: Mesh,
    price: Price,
) -> fx.Node:
    """The node that holds `value` as wanted, made from the cheapest version that exists."""
    if want in versions:
        return versions[want]
    type_, differentiable = value.meta["type"], value.meta["differentiable"]
    layout, pending = want

    def cost(state: State) -> float:
        return redistribution_cost(
            state[0],
            layout,
            pending,
            type_.shape,
            type_.dtype.itemsize,
            mesh,
            price,
            differentiable=differentiable,
        )

    start = min((state for state in versions if not state[1]), key=cost)
    path = redistribute(
        start[0],
        layout,
        pending,
        type_.shape,
        type_.dtype.itemsize,
        mesh,
        price,
        differentiable=differentiable,
    )
    node, state = versions[start], start
    for movement in path:
        state = _after(state, movement)
        if state not in versions:
            with graph.inserting_before(reader):
                versions[state] = insert_movement(graph, node, movement)
        node = versions[state]
        node.meta["module"], node.meta["source"] = reader.meta["module"], reader.meta["source"]
    return node


def insert_movement(graph: fx.Graph, value: fx.Node, movement: Movement) -> fx.Node:
    """One movement of `value` at the graph's insertion point."""
    operator = getattr(torch.ops.autopar, movement.kind).default
    node = graph.create_node("call_function", operator, (value,), name=movement.kind)
    before = value.meta["type"]
    node.meta = {
        "val": value.meta["val"],
        "type": TensorType(before.shape, before.dtype, movement.apply(before.layout)),
        "wants": ((before.layout, ()),),
        "movement": movement,
        "source": value.meta["source"],
        "module": value.meta["module"],
        "differentiable": value.meta["differentiable"],
    }
    return node


def _after(state: State, movement: Movement) -> State:
    pending = state[1] + (movement.axes if movement.pending else ())
    return movement.apply(state[0]), tuple(sorted(pending))


def _rewire(reader: fx.Node, before: tuple[fx.Node, ...], after: list[fx.Node]) -> None:
    """Replace the tensor inputs of `reader` one by one: one value may be wanted in two layouts."""
    replacements = iter(after)
    remaining = list(before)

    def swap(value: fx.Node) -> fx.Node:
        assert value is remaining.pop(0)
        return next(replacements)

    reader.args = fx.map_arg(reader.args, swap)
    reader.kwargs = fx.map_arg(reader.kwargs, swap)
