"""Random cost graphs of known shapes, and the slowest way to solve them: try everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from autopar.solver.cost_graph import CostGraph

Pairs = list[tuple[int, int]]


def shape(name: str, rng: np.random.Generator) -> tuple[int, Pairs]:
    """Return the numbers of nodes and of edges of a graph of this name."""
    fixed: dict[str, tuple[int, Pairs]] = {
        "single": (1, []),
        "apart": (4, [(0, 1), (2, 3)]),
        "diamond": (4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        "four_cycle": (4, [(0, 2), (0, 3), (1, 2), (1, 3)]),  # two sources, two sinks
        "triangle": (3, [(0, 1), (0, 2), (1, 2)]),
        "triangles": (6, [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (3, 5), (4, 5)]),
        "prism": (6, [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (0, 3), (1, 4), (2, 5)]),
        "k33": (6, [(a, b) for a in range(3) for b in range(3, 6)]),
        "k5": (5, list(itertools.combinations(range(5), 2))),
        "wheel": (7, [*((0, rim) for rim in range(1, 7)), *((i, i % 6 + 1) for i in range(1, 7))]),
        "grid": (
            9,
            [
                (i, i + step)
                for i in range(9)
                for step in (1, 3)
                if i + step < 9 and (step == 3 or i % 3 < 2)
            ],
        ),
        "parallel": (3, [(0, 1), (1, 0), (0, 1), (1, 2), (2, 1)]),
        "residual": (6, [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4), (4, 5)]),
    }
    if name in fixed:
        return fixed[name]
    n = int(rng.integers(2, 8))
    if name == "chain":
        return n, [(i, i + 1) for i in range(n - 1)]
    if name == "tree":
        return n, [(int(rng.integers(0, i)), i) for i in range(1, n)]
    if name == "cycle":
        n = max(n, 3)
        return n, [(i, (i + 1) % n) for i in range(n)]
    if name == "hubs":  # one or two nodes that all of a cycle look into, some of them twice
        hubs = n % 2 + 1
        rim = range(hubs, hubs + 5)
        ring = [(i, i + 1 if i + 1 in rim else hubs) for i in rim]
        spokes = [(i, hub) for hub in range(hubs) for i in rim if rng.random() < 0.8]
        return hubs + 5, [*ring, *spokes, *spokes[:2]]
    assert name == "random"
    share = rng.choice([0.2, 0.4, 0.7])
    pairs = itertools.permutations(range(n), 2)
    return n, [pair for pair in pairs if rng.random() < share / 2]


SHAPES = [
    *("single", "apart", "diamond", "four_cycle", "triangle", "triangles", "prism", "k33", "k5"),
    *("parallel", "residual", "chain", "tree", "cycle", "random", "wheel", "grid", "hubs"),
]


def random_graph(
    name: str,
    rng: np.random.Generator,
    *,
    most: int = 3,
    memory: bool = False,
    impossible: float = 0.0,
) -> CostGraph:
    """Return a graph with whole numbers as costs, so that ties are common and sums are exact."""
    count, pairs = shape(name, rng)
    graph = CostGraph()
    sizes = [int(size) for size in rng.integers(1, most + 1, count)]
    for size in sizes:
        bytes_ = rng.integers(0, 12, size) if memory and rng.random() < 0.8 else None
        graph.add_node(rng.integers(0, 20, size), bytes_)
    for a, b in pairs:
        cost = rng.integers(0, 20, (sizes[a], sizes[b])).astype(float)
        cost[rng.random(cost.shape) < impossible] = np.inf
        bytes_ = rng.integers(0, 6, cost.shape) if memory and rng.random() < 0.3 else None
        graph.add_edge(a, b, cost, bytes_)
    return graph


def all_choices(graph: CostGraph) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(graph.strategies(node)) for node in range(len(graph))))


def brute_force(graph: CostGraph, limit: float = np.inf) -> float:
    """Return the least cost of all choices that fit; infinite if there is none."""
    return min(c for c, m in everything(graph) if m <= limit or np.isinf(limit))


def everything(graph: CostGraph) -> list[tuple[float, float]]:
    """Return cost and memory of every choice, summed without the solver."""
    node_tables, edge_tables, nodes, edges = graph.tables()
    sizes = [graph.strategies(node) for node in range(len(graph))]
    totals = []
    for kind in ("cost", "memory"):
        total = np.zeros(sizes)
        for node, table in enumerate(nodes):
            values = getattr(node_tables[table], kind)
            if values is not None:
                total += values.reshape([-1 if d == node else 1 for d in range(len(sizes))])
        for low, high, table in edges:
            values = getattr(edge_tables[table], kind)
            if values is not None:
                total += values.reshape([s if d in (low, high) else 1 for d, s in enumerate(sizes)])
        totals.append(total.ravel().tolist())
    return list(zip(*totals))


def periodic_graph(rng: np.random.Generator, blocks: int, period: int) -> CostGraph:
    """Return a graph of equal random blocks, with something before and after them.
    Each block is joined to the one or two before it and to nodes that all share. What comes after
    may look into any block."""
    graph = CostGraph()

    def size() -> int:
        return int(rng.integers(2, 4))

    def cost(*shape: int) -> np.ndarray:
        return rng.integers(0, 30, shape).astype(float)

    shared = [(graph.add_node(cost(k)), k) for k in (size() for _ in range(rng.integers(0, 3)))]
    before = [(graph.add_node(cost(k)), k) for k in (size() for _ in range(rng.integers(0, 3)))]
    sizes = [size() for _ in range(period)]
    nodes = [(cost(k), cost(k) if rng.random() < 0.5 else None) for k in sizes]
    inside = [
        (a, b, cost(sizes[a], sizes[b]))
        for a, b in itertools.combinations(range(period), 2)
        if rng.random() < (0.9 if b == a + 1 else 0.2)
    ]
    reach = int(rng.integers(1, 3))
    across = [
        (a, b, back, cost(sizes[a], sizes[b]))
        for a, b in itertools.product(range(period), repeat=2)
        for back in range(1, reach + 1)
        if rng.random() < 1.0 / period**2
    ]
    common = [
        (node, p, cost(k, sizes[p]))
        for (node, k), p in itertools.product(shared, range(period))
        if rng.random() < 0.3
    ]
    ids: list[list[int]] = []
    for block in range(blocks):
        own = [graph.add_node(*entry) for entry in nodes]
        ids.append(own)
        for a, b, matrix in inside:
            graph.add_edge(own[a], own[b], matrix)
        for a, b, back, matrix in across:
            if block >= back:
                graph.add_edge(ids[block - back][a], own[b], matrix)
        for node, p, matrix in common:
            graph.add_edge(node, own[p], matrix)
    if before:
        node, k = before[-1]
        graph.add_edge(node, ids[0][0], cost(k, sizes[0]))
    for _ in range(int(rng.integers(0, 3))):
        k, p = size(), int(rng.integers(0, period))
        block = blocks - 1 if rng.random() < 0.6 else int(rng.integers(0, blocks))
        graph.add_edge(ids[block][p], graph.add_node(cost(k)), cost(sizes[p], k))
    if rng.random() < 0.3:  # one node that looks into every block, as a sum of their losses does
        k, p = size(), int(rng.integers(0, period))
        matrix, last = cost(sizes[p], k), graph.add_node(cost(k))
        for own in ids:
            graph.add_edge(own[p], last, matrix)
    return graph
