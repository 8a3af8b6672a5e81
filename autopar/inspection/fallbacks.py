"""Fallbacks: what it costs that an operator runs replicated, whole on every rank.

Its FLOPs are not known without a rule; what is counted is that every rank reads and writes whole
tensors, and that they are brought there whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.cluster import Device
from autopar.collectives import movement_cost
from autopar.cost.model import operator_seconds
from autopar.cost.price import ClusterPrice
from autopar.mesh import Mesh
from autopar.search.decisions import Fallback


@dataclass(frozen=True)
class FallbackCost:
    """One operator that runs replicated, and the seconds of a step that this costs."""

    node: str
    operator: str
    reason: str
    source: str
    seconds: float  # of the operator, forward and backward
    moved: float  # seconds of the movements that bring its inputs whole

    @property
    def cost(self) -> float:
        """Against being cut over all ranks: the movements, and all but its share of the work."""
        return self.seconds + self.moved


def fallback_costs(
    fallbacks: tuple[Fallback, ...], graph: fx.Graph, mesh: Mesh, price: ClusterPrice
) -> tuple[FallbackCost, ...]:
    """The costs of all fallbacks of the rewritten `graph`."""
    nodes = {node.name: node for node in graph.nodes}
    found = []
    for fallback in fallbacks:
        node = nodes.get(fallback.node)
        if node is None:
            continue
        whole = _whole_seconds(node, price.cluster.device) * (1 - 1 / mesh.size)
        moved = sum(_brought(value, mesh, price) for value in node.all_input_nodes)
        found.append(
            FallbackCost(
                fallback.node, fallback.operator, fallback.reason, fallback.source, whole, moved
            )
        )
    return tuple(found)


def movement_seconds(node: fx.Node, mesh: Mesh, price: ClusterPrice) -> float:
    """Forward and backward seconds of a movement of a rewritten graph."""
    before = node.args[0].meta["type"]  # type: ignore[union-attr]
    differentiable = node.meta["differentiable"]
    size = before.dtype.itemsize
    movement = node.meta["movement"]
    return movement_cost(movement, before.layout, before.shape, size, mesh, price, differentiable)


def _whole_seconds(node: fx.Node, device: Device) -> float:
    values = [*node.all_input_nodes, node]
    moved = sum(float(value.meta["type"].bytes) for value in values)
    once = operator_seconds(device, node.meta["val"].dtype, flops=0.0, moved=moved)
    return float(once) * (2 if node.meta["differentiable"] else 1)


def _brought(value: fx.Node, mesh: Mesh, price: ClusterPrice) -> float:
    """The movements right before a reader."""
    total = 0.0
    while "movement" in value.meta and len(value.users) == 1:
        total += movement_seconds(value, mesh, price)
        value = value.all_input_nodes[0]
    return total
