"""Improve a choice on one random forest of nodes after another, the rest as it is.

>>> apart = np.array([[0.0, 1.0], [1.0, 0.0]])
>>> nodes = {v: np.array([0.0, 0.1]) for v in range(3)}
>>> around = {0: [(1, apart)], 1: [(0, apart), (2, apart)], 2: [(1, apart)]}
>>> improved(nodes, around, {0: 1, 1: 1, 2: 1}, moves=1)
{0: 0, 1: 0, 2: 0}

A forest has no cycle of edges among its own nodes. Its best strategies, with all others as they
are, are found exactly, from the leaves to the roots and back. So no move makes a choice worse.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import numpy as np

from autopar.solver.packed_graph import Array

Near = list[tuple[int, Array]]  # the other end of each edge of a node; its table, own in the rows

_IDLE = 4  # moves in a row that change nothing, after which no more are tried


def improved(
    nodes: Mapping[int, Array],
    neighbours: Mapping[int, Near],
    choice: Mapping[int, int],
    moves: int,
) -> dict[int, int]:
    """Return the choice after so many moves, or fewer where they change nothing."""
    best, draw, order = dict(choice), random.Random(0), list(nodes)
    idle = 0
    for _ in range(moves):
        before = dict(best)
        draw.shuffle(order)
        _move(nodes, neighbours, best, _forest(neighbours, order))
        idle = idle + 1 if best == before else 0
        if idle == _IDLE:
            break
    return best


def _forest(neighbours: Mapping[int, Near], order: Iterable[int]) -> dict[int, int]:
    """Return nodes without a cycle among them, each with how many of these it touches."""
    tree: dict[int, int] = {}
    touches: dict[int, int] = {}

    def root(v: int) -> int:
        while tree[v] != v:
            tree[v] = tree[tree[v]]
            v = tree[v]
        return v

    for v in order:
        tree_neighbours = [u for u, _ in neighbours[v] if u in tree]
        roots = {root(u) for u in tree_neighbours}
        if len(roots) == len(tree_neighbours):
            tree[v], touches[v] = v, len(tree_neighbours)
            tree.update(dict.fromkeys(roots, v))
            for u in tree_neighbours:
                touches[u] += 1
    return touches


def _move(
    nodes: Mapping[int, Array],
    neighbours: Mapping[int, Near],
    choice: dict[int, int],
    touches: dict[int, int],
) -> None:
    """Choose for the nodes of a forest what is best of it."""
    costs: dict[int, Array] = {}
    for v in touches:
        cost = nodes[v]
        for u, table in neighbours[v]:
            if u not in touches:
                cost = cost + table[:, choice[u]]
        costs[v] = cost
    leaves = [v for v, count in touches.items() if count < 2]
    trail: dict[int, tuple[int, Array] | None] = {}  # where each went
    while leaves:
        v = leaves.pop()
        if v in trail:
            continue
        ends = ((u, table) for u, table in neighbours[v] if u in touches and u not in trail)
        trail[v] = end = next(ends, None)
        if end is not None:
            u, table = end
            costs[u] = costs[u] + (table + costs[v][:, None]).min(axis=0)
            touches[u] -= 1
            if touches[u] < 2:
                leaves.append(u)
    for v in reversed(trail):
        end = trail[v]
        choice[v] = int(
            np.argmin(costs[v] if end is None else costs[v] + end[1][:, choice[end[0]]])
        )
