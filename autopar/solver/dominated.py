"""Drop dominated strategies: those that another one can replace wherever they stand.

>>> from autopar.solver.cost_graph import CostGraph
>>> graph = CostGraph()
>>> a = graph.add_node([1.0, 2.0, 0.5], memory=[4, 4, 9])
>>> b = graph.add_node([0.0, 0.0])
>>> graph.add_edge(a, b, [[0.0, 1.0], [0.5, 1.0], [0.0, 1.0]])
>>> pruned = prune(graph.packed)
>>> pruned.sizes.tolist(), pruned.strategy[pruned.node_table[0]].tolist()
([2, 1], [0, 2])

Strategy j of a node is dominated by i when, whatever the neighbours choose, putting i in the place
of j costs no more seconds and no more memory: the sum over node and edges of the least difference
is not negative, in both. Nodes with equal tables and edges are compared once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver.cost_graph import Array, Integers, PackedGraph, Table

ROUNDS = 2
_MOST_EDGES = 24  # a node with more is left as it is
_MOST_STRATEGIES = 64  # a node with more takes longer to compare than to eliminate
_AT_ONCE = 1 << 20  # differences that are held at a time
_SAMPLES = 4  # columns of an edge that are tried before all of them


def prune(packed: PackedGraph, rounds: int = ROUNDS) -> PackedGraph:
    """Drop dominated strategies; the optimum stays the same under any limit."""
    for _ in range(rounds):
        smaller = _round(packed)
        if smaller is packed:
            break
        packed = smaller
    return packed


def _round(packed: PackedGraph) -> PackedGraph:
    """Drop in all nodes at once what is dominated with every strategy of the neighbours present.
    One replacement after the other then never makes a choice worse."""
    kinds, examples = _surroundings(packed)
    strategies: list[Integers] = []
    edge_tables = packed.tables_at(examples)
    for example in examples.tolist():
        table, edges = packed.node_tables[packed.node_table[example]], edge_tables[example]
        if len(edges) > _MOST_EDGES or len(table.cost) > _MOST_STRATEGIES:
            strategies.append(np.arange(len(table.cost)))
        else:
            strategies.append(_undominated(table, edges))
    if all(len(k) == packed.sizes[example] for k, example in zip(strategies, examples)):
        return packed
    return restricted(packed, kinds, strategies)


def _undominated(table: Table, edges: list[Table]) -> Integers:
    """Return the strategies of one node that stay."""
    count = len(table.cost)
    if count == 1:
        return np.arange(1)
    dominates = np.ones((count, count), bool)  # [i, j]: i may replace j
    for kind in ("cost", "memory"):
        vector = getattr(table, kind)
        rows = [matrix for edge in edges if (matrix := getattr(edge, kind)) is not None]
        if vector is None and not rows:
            continue
        vector = np.zeros(count) if vector is None else vector
        dominates &= _no_worse(_capped(vector, rows), dominates)
    for j in range(count - 1, -1, -1):
        others = dominates[:, j].copy()
        others[j] = False
        if others.any():
            dominates[j, :] = False  # what is dropped can no longer replace another
    np.fill_diagonal(dominates, False)
    return np.flatnonzero(~dominates.any(axis=0))


def _capped(vector: Array, rows: list[Array]) -> tuple[Array, list[Array]]:
    """Replace infinity by a number above every finite sum, so that differences are numbers."""
    finite = sum(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in (vector, *rows))
    if np.isfinite(vector).all() and all(np.isfinite(row).all() for row in rows):
        return vector, rows
    large = 4 * finite + 1
    return np.minimum(vector, large), [np.minimum(row, large) for row in rows]


def _no_worse(weights: tuple[Array, list[Array]], candidates: np.ndarray) -> np.ndarray:
    """Return a matrix: [i, j] is whether i in the place of j never weighs more."""
    vector, rows = weights
    least = vector[None, :] - vector[:, None]
    for row in rows:  # a few columns first: the least over them is not less than over all
        columns = row[:, :: max(1, row.shape[1] // _SAMPLES)]
        least = least + (columns[None, :, :] - columns[:, None, :]).min(axis=-1)
    i, j = np.nonzero(candidates & (least >= 0))
    is_pair = i != j
    i, j = i[is_pair], j[is_pair]
    exact = vector[j] - vector[i]
    for row in rows:
        exact = exact + _least_difference(row, i, j)
        remain = exact >= 0 if row is rows[-1] else slice(None)
        i, j, exact = i[remain], j[remain], exact[remain]
    answer = np.zeros_like(candidates)
    answer[i[exact >= 0], j[exact >= 0]] = True
    return answer


def _least_difference(row: Array, i: Integers, j: Integers) -> Array:
    """Return the least of row[j] - row[i] for many pairs, some at a time."""
    step = max(1, _AT_ONCE // row.shape[1])
    parts = [
        (row[j[at : at + step]] - row[i[at : at + step]]).min(axis=-1)
        for at in range(0, len(i), step)
    ]
    return np.concatenate([np.zeros(0), *parts])


def _surroundings(packed: PackedGraph) -> tuple[Integers, Integers]:
    """Number the nodes, equal where node and edges are equal; return an example of each, too."""
    n = len(packed)
    ends = np.concatenate([packed.low, packed.high])
    codes = np.concatenate([2 * packed.edge_table, 2 * packed.edge_table + 1])
    order = np.lexsort((codes, ends))
    ends, codes = ends[order], codes[order]
    degree = np.bincount(ends, minlength=n)
    rank = np.arange(len(ends)) - np.searchsorted(ends, ends)
    kind = packed.node_table.copy()
    for column in range(min(_MOST_EDGES, int(degree.max(initial=0)))):
        code = np.zeros(n, np.int64)
        has_rank = rank == column
        code[ends[has_rank]] = codes[has_rank] + 1
        kind = np.unique(kind * (2 * len(packed.edge_tables) + 2) + code, return_inverse=True)[1]
    # Nodes with many edges all count as one more kind of their table, which keeps everything.
    is_crowded = degree > _MOST_EDGES
    kind[is_crowded] = kind.max(initial=0) + 1 + packed.node_table[is_crowded]
    _, example, kind = np.unique(kind, return_index=True, return_inverse=True)
    return kind.ravel(), example


def restricted(packed: PackedGraph, kinds: Integers, strategies: list[Integers]) -> PackedGraph:
    """Return the graph with only the strategies `strategies[kinds[i]]` of node i."""
    tables: dict[tuple[int, bytes], int] = {}
    node_tables: list[Table] = []
    strategy: list[Integers] = []
    masks: list[Integers] = []
    table_number = np.empty(len(strategies), np.int64)
    first = np.unique(kinds, return_index=True)[1]
    for kind, (keep, example) in enumerate(zip(strategies, first)):
        table = int(packed.node_table[example])
        key = (table, keep.tobytes())
        if key not in tables:
            tables[key] = len(node_tables)
            node_tables.append(packed.node_tables[table].taken(keep))
            strategy.append(packed.strategy[table][keep])
            masks.append(keep)
        table_number[kind] = tables[key]
    node_table = table_number[kinds]
    count = len(node_tables)
    code = (packed.edge_table * count + node_table[packed.low]) * count + node_table[packed.high]
    distinct, edge_table = np.unique(code, return_inverse=True)
    edge_tables = []
    for entry in distinct.tolist():
        rest, high = divmod(entry, count)
        table, low = divmod(rest, count)
        edge_tables.append(packed.edge_tables[table].taken(masks[low], masks[high]))
    return replace(
        packed,
        node_tables=node_tables,
        edge_tables=edge_tables,
        node_table=node_table,
        edge_table=edge_table.ravel(),
        strategy=strategy,
    )
