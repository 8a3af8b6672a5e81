"""Other ways to solve a cost graph, to compare with: quick ones without proof (MindSpore's greedy
recursion, and propagation), and the exact one with parts of it left out.

>>> graph = CostGraph()
>>> a, b = graph.add_node([3.0, 1.0]), graph.add_node([0.0, 0.5])
>>> graph.add_edge(a, b, [[0.0, 9.0], [9.0, 0.0]])
>>> SOLVERS["recursive"](graph).choice, SOLVERS["propagate"](graph).choice
([1, 1], [1, 1])
>>> solve_with(Optimiser(graph.packed, fold=False)).choice
[1, 1]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autopar.solver.branch_and_bound import branch_and_bound
from autopar.solver.cost_graph import CostGraph
from autopar.solver.lagrangian import LagrangianSearch
from autopar.solver.optimum import Optimiser
from autopar.solver.packed_graph import Array, Integers, PackedGraph
from autopar.solver.solve import ProblemSizes, Solution, solve


def solve_with(optimiser: Optimiser, memory: float = np.inf, tolerance: float = 0.01) -> Solution:
    """Return the solution of `solve` with this optimiser on its graph."""
    search = LagrangianSearch(optimiser.packed, memory, optimiser, tolerance)
    branch_and_bound(search)
    assert search.choice is not None
    sizes = ProblemSizes(core_nodes=optimiser.core)
    return _solution(optimiser.packed, search.choice, min(search.bound, search.value), sizes)


def _quick(choose: Callable[[PackedGraph], Integers]) -> Callable[..., Solution]:
    def solved(graph: CostGraph, *_: Any, **__: Any) -> Solution:
        packed = graph.packed
        return _solution(packed, choose(packed), trivial_bound(packed), ProblemSizes())

    return solved


def _solution(packed: PackedGraph, choice: Integers, bound: float, sizes: ProblemSizes) -> Solution:
    cost, memory = packed.evaluate(choice)
    return Solution(packed.original(choice).tolist(), cost, memory, bound, 0.0, sizes)


def recursive(packed: PackedGraph) -> Integers:
    """Choose for the heaviest operator first, each the cheapest strategy beside earlier choices.
    Later operators are expected to agree."""
    weight = np.array([_finite_maximum(table.cost) for table in packed.node_tables])
    order = np.argsort(-weight[packed.node_table], kind="stable")
    return _greedy(packed, iter(order.tolist()), own=1.0)


def propagate(packed: PackedGraph) -> Integers:
    """Choose outwards from nodes with one strategy, or from the heaviest if there are none.
    Each takes what needs the least movement from the nodes chosen before it."""
    around = _neighbours(packed)
    pinned = np.flatnonzero(packed.sizes == 1).tolist()
    weight = np.array([_finite_maximum(table.cost) for table in packed.node_tables])
    heaviest = np.argsort(-weight[packed.node_table], kind="stable").tolist()

    def order() -> Iterator[int]:
        seen: set[int] = set()
        for root in [*pinned, *heaviest]:
            starts = pinned if root in pinned else [root]
            waiting = [(0, start) for start in starts if start not in seen]
            while waiting:
                distance, node = heapq.heappop(waiting)
                if node in seen:
                    continue
                seen.add(node)
                yield node
                for other, _ in around[node]:
                    if other not in seen:
                        heapq.heappush(waiting, (distance + 1, other))

    return _greedy(packed, order(), own=1e-6)


def trivial_bound(packed: PackedGraph) -> float:
    """Return the sum of the cheapest entry of every node and every edge."""
    nodes = np.array([table.cost.min() for table in packed.node_tables] or [0.0])
    edges = np.array([table.cost.min() for table in packed.edge_tables] or [0.0])
    return float(nodes[packed.node_table].sum() + edges[packed.edge_table].sum())


def _greedy(packed: PackedGraph, order: Iterator[int], own: float) -> Integers:
    around = _neighbours(packed)
    choice = np.full(len(packed), -1)
    for node in order:
        total: Array = packed.node_tables[packed.node_table[node]].cost * own
        for other, row in around[node]:
            if choice[other] >= 0:
                total = total + row(int(choice[other]))
        choice[node] = int(np.argmin(total))
    return choice


def _neighbours(packed: PackedGraph) -> list[list[tuple[int, Callable[[int], Array]]]]:
    """Return the neighbours of each node, with the costs of its strategies beside theirs."""
    around: list[list[tuple[int, Callable[[int], Array]]]] = [[] for _ in range(len(packed))]
    for low, high, number in zip(packed.low, packed.high, packed.edge_table):
        cost = packed.edge_tables[number].cost
        around[low].append((int(high), lambda s, cost=cost: cost[:, s]))
        around[high].append((int(low), lambda s, cost=cost: cost[s]))
    return around


def _finite_maximum(cost: Array) -> float:
    return float(cost[np.isfinite(cost)].max(initial=0.0))


SOLVERS: dict[str, Callable[..., Solution]] = {
    "exact": solve,
    "recursive": _quick(recursive),
    "propagate": _quick(propagate),
}
