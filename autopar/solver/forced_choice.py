"""Find the least seconds of a cost graph with each strategy of one node forced.

>>> graph = CostGraph()
>>> a, b = graph.add_node([3.0, 1.0]), graph.add_node([0.0, 0.5])
>>> graph.add_edge(a, b, [[0.0, 9.0], [9.0, 0.0]])
>>> forced(graph, a).tolist()
[3.0, 1.5]

A twin is tied to the node: a strategy of one goes with the same of the other. With the twin none
of the node's strategies dominates another, and repeated blocks fold to the left and right of it.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.cost_graph import CostGraph
from autopar.solver.dominated import prune
from autopar.solver.optimum import Optimiser
from autopar.solver.packed_graph import Array


def forced(
    graph: CostGraph, node: int, multiplier: float = 0.0, limit: float | None = None
) -> Array:
    """Return the least seconds of the whole graph with each strategy of `node`.

    Under a memory `limit` that binds, with its multiplier, no plan that fits takes less than
    this."""
    packed = prune(_with_twin(graph, node).packed)
    twin = int(np.flatnonzero(packed.origin == 0)[0])
    least = np.full(graph.strategies(node), np.inf)  # what is not possible at all is pruned
    possible = packed.strategy[packed.node_table[twin]]
    optimiser = Optimiser(packed)
    if len(possible) == 1:  # as others may have, with which it stands in a chain
        least[possible] = optimiser.minimise(multiplier).value
    else:
        least[possible] = optimiser.least_with(twin, multiplier)
    return least - multiplier * limit if multiplier and limit is not None else least


def _with_twin(graph: CostGraph, node: int) -> CostGraph:
    """Return the graph with a twin of `node` before all others."""
    tables, edge_tables, nodes, edges = graph.tables()
    count = graph.strategies(node)
    copy = CostGraph()
    twin = copy.add_node(np.zeros(count), name="twin")
    for number, name in zip(nodes, graph.names):
        copy.add_node(tables[number].cost, tables[number].memory, name)
    tie = np.full((count, count), np.inf)
    np.fill_diagonal(tie, 0.0)
    copy.add_edge(twin, node + 1, tie)
    for low, high, number in edges:
        table = edge_tables[number]
        copy.add_edge(low + 1, high + 1, table.cost, table.memory)
    return copy
