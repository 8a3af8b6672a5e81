"""The cost of operators that run replicated, whole on every rank, for want of a rule.

Two things are counted: every rank does all of the work, and inputs are brought there whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.cost.time_report import NodePrices
from autopar.search.decisions import Fallback
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class FallbackCost(Fallback):
    """One operator that runs replicated, and the seconds of a step that this costs."""

    seconds: float  # of the operator, forward and backward
    moved: float  # seconds of the movements that bring its inputs whole

    @property
    def cost(self) -> float:
        """The seconds that cutting it over all ranks would save: movements, and others' work."""
        return self.seconds + self.moved


def fallback_costs(
    fallbacks: tuple[Fallback, ...], graph: fx.Graph, prices: NodePrices
) -> tuple[FallbackCost, ...]:
    """Return the costs of all fallbacks of the rewritten `graph`."""
    nodes = {node.name: node for node in graph.nodes}
    share = 1 - 1 / prices.mesh.size
    return tuple(
        FallbackCost(
            **vars(fallback),
            seconds=prices(node).seconds * share,
            moved=sum(_brought(value, prices) for value in node.all_input_nodes),
        )
        for fallback in fallbacks
        if (node := nodes.get(fallback.node)) is not None
    )


def _brought(value: fx.Node, prices: NodePrices) -> float:
    """Return the seconds of the movements right before a reader."""
    total = 0.0
    while info(value).movement is not None and len(value.users) == 1:
        total += prices(value).seconds
        value = value.all_input_nodes[0]
    return total
