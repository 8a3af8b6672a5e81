"""Parameter gathers: a parameter that is stored more cut than its readers want it is gathered.

Runs after all passes that read parameters in their working layout. The placeholder now has the
layout of the storage; behind it stands the gather that all readers share. Its backward scatters the
sum of the gradient over axes of the parameter's `sync`, which no longer names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.collectives import redistribute
from autopar.collectives.redistribution import Price
from autopar.layout import Placement
from autopar.passes.insert_movements import insert_movement
from autopar.passes.pass_context import RewriteContext
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType


@dataclass(frozen=True)
class _Scattering:
    """Price a gradient's reduction so that it is scattered, not summed whole and then cut.
    So it is even on machines that are slower so: gradients stay in pieces, copies in groups."""

    price: Price

    def seconds(self, kind: str, axes: tuple[str, ...], size: Any) -> Any:
        """Return the seconds of a movement; a reduce-scatter costs half an all-reduce."""
        if kind != "reduce_scatter":
            return self.price.seconds(kind, axes, size)
        return self.price.seconds("all_reduce", axes, size) / 2  # which scatters, and gathers


def gather_parameters(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Insert the gathers of parameters before their first readers."""
    gathered: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        for value in node.all_input_nodes:
            if _is_apart(value) and value not in gathered:
                gathered[value] = _gather(graph, context, value, node)
            if value in gathered:
                node.replace_input_with(value, gathered[value])
    for node in graph.find_nodes(op="placeholder"):
        if node not in gathered and _is_apart(node):
            _store(node)  # nobody reads it
    return graph


def _is_apart(node: fx.Node) -> bool:
    places = info(node).places
    return places is not None and places.storage != places.working


def _store(node: fx.Node) -> None:
    places, before = info(node).places, info(node).type
    assert places is not None
    info(node).type = TensorType(before.shape, before.dtype, places.storage)


def _gather(graph: fx.Graph, context: RewriteContext, node: fx.Node, reader: fx.Node) -> fx.Node:
    """Return the last of the movements from where a parameter is stored to its working layout."""
    places, type_ = info(node).places, info(node).type
    assert places is not None
    extra_axes = set(places.storage.axes) - set(places.working.axes)
    summed = extra_axes & set(info(node).sync)
    info(node).sync = tuple(axis for axis in info(node).sync if axis not in summed)
    _store(node)
    end, size = Placement(places.working, summed), type_.dtype.itemsize
    price = _Scattering(context.price)
    back, learns = info(node).differentiable, info(node).learns
    path = redistribute(places.storage, end, type_.shape, size, context.mesh, price, back, learns)
    with graph.inserting_before(reader):
        for movement in path:
            node = insert_movement(graph, node, movement, reader)
            info(node).module, info(node).source = info(reader).module, info(reader).source
    return node
