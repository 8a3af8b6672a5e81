"""CostGraph: nodes with a cost for each strategy, edges with a cost for each pair of strategies.

>>> graph = CostGraph()
>>> a = graph.add_node([1.0, 2.0], memory=[8, 4], name="linear")
>>> b = graph.add_node([5.0, 1.0])
>>> graph.add_edge(a, b, [[0.0, 9.0], [9.0, 0.0]])  # seconds to redistribute between them
>>> graph.evaluate([1, 1])
(3.0, 4.0)

Costs are seconds, memory is bytes; a cost may be infinite, where a pair cannot be. Parallel edges
add. A tensor with several consumers is a node of its own, so that they share a redistribution.

Nodes are given in the order of the program: that is where repeated blocks are found. Equal vectors
and matrices are kept once: give the same array again and it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from autopar.errors import InvalidInput
from autopar.solver.packed_graph import Array, BlockRow, Integers, PackedGraph, Table


class _Tables:
    """Distinct tables by number. Arrays are known again by identity, then by content."""

    def __init__(self) -> None:
        self.all: list[Table] = []
        self._arrays: dict[int, tuple[Any, int]] = {}  # id -> (the array, so it lives; number)
        self._contents: dict[tuple[Any, ...], int] = {}
        self._values: list[Array] = []
        self._pairs: dict[tuple[int, int], int] = {}

    def add(self, cost: ArrayLike, memory: ArrayLike | None, ndim: int) -> int:
        key = (self._array(cost, ndim), -1 if memory is None else self._array(memory, ndim))
        if key not in self._pairs:
            costs, kept = self._values[key[0]], None if key[1] < 0 else self._values[key[1]]
            if np.isneginf(costs).any() or (kept is not None and not np.isfinite(kept).all()):
                raise InvalidInput(
                    "a cost is a number or +infinity, a memory is a number",
                    got=f"{np.asarray(cost).tolist()}, {np.asarray(memory).tolist()}"[:200],
                    remedy="leave out strategies that cannot be, or give them infinite cost",
                )
            if kept is not None and kept.shape != costs.shape:
                raise InvalidInput(
                    "memory has the shape of the costs",
                    got=f"costs {costs.shape}, memory {kept.shape}",
                    remedy="give one number of bytes for each strategy",
                )
            if kept is not None and not kept.any():
                kept = None
            self._pairs[key] = len(self.all)
            self.all.append(Table(costs, kept))
        return self._pairs[key]

    def turned(self, number: int) -> int:
        table = self.all[number].transposed
        return self.add(table.cost, table.memory, 2)

    def _array(self, given: ArrayLike, ndim: int) -> int:
        known = self._arrays.get(id(given))
        if known is not None and known[0] is given:
            return known[1]
        array = np.array(given, dtype=np.float64, order="C")
        if array.ndim != ndim or 0 in array.shape or np.isnan(array).any():
            raise InvalidInput(
                f"costs and memory are arrays of {ndim} dims, not empty, without NaN",
                got=f"shape {array.shape}",
                remedy="a node has one number for each strategy, an edge one for each pair",
            )
        number = self._contents.setdefault((array.shape, array.tobytes()), len(self._values))
        if number == len(self._values):
            self._values.append(array)
        self._arrays[id(given)] = (given, number)
        return number


class CostGraph:
    """Built node by node; solved by `autopar.solver.solve`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._node_tables, self._edge_tables = _Tables(), _Tables()
        self._nodes: list[int] = []
        self._edges: list[tuple[int, int, int]] = []
        self._packed: PackedGraph | None = None
        self._repeated: tuple[Sequence[int], int] = (), 1

    def __len__(self) -> int:
        return len(self._nodes)

    def add_node(
        self, cost: ArrayLike, memory: ArrayLike | None = None, name: str | None = None
    ) -> int:
        """A node with `cost[s]` seconds and `memory[s]` bytes under strategy s; its number."""
        self._packed = None
        self._nodes.append(self._node_tables.add(cost, memory, 1))
        self.names.append(f"node{len(self.names)}" if name is None else name)
        return len(self._nodes) - 1

    def add_edge(
        self, first: int, second: int, cost: ArrayLike, memory: ArrayLike | None = None
    ) -> None:
        """An edge that costs `cost[s, t]` when `first` takes strategy s and `second` takes t."""
        self._packed = None
        number = self._edge_tables.add(cost, memory, 2)
        given = self._edge_tables.all[number].cost.shape
        if first == second or not (0 <= first < len(self) and 0 <= second < len(self)):
            raise InvalidInput(
                "an edge joins two different nodes of the graph",
                got=f"{first} and {second} of {len(self)} nodes",
                remedy="a node's dealings with itself belong to its own cost",
            )
        if given != (self.strategies(first), self.strategies(second)):
            raise InvalidInput(
                "an edge has a cost for each pair of strategies of its two nodes",
                got=f"shape {given} between {self.names[first]!r} with {self.strategies(first)} "
                f"and {self.names[second]!r} with {self.strategies(second)} strategies",
                remedy="rows are of the first node, columns of the second",
            )
        if first > second:
            first, second, number = second, first, self._edge_tables.turned(number)
        self._edges.append((first, second, number))

    def repeat(self, nodes: Sequence[int], times: int) -> None:
        """Let these nodes, a block between blocks that are equal, stand for so many blocks. A
        choice is then the same in all of these."""
        self._packed = None
        self._repeated = nodes, times

    def strategies(self, node: int) -> int:
        """How many strategies `node` has."""
        return len(self._node_tables.all[self._nodes[node]].cost)

    def evaluate(self, choice: Sequence[int] | Integers) -> tuple[float, float]:
        """Seconds and bytes when node i takes strategy choice[i]."""
        packed = self.packed
        return packed.evaluate(np.asarray(choice, np.int64)[packed.origin])

    @property
    def packed(self) -> PackedGraph:
        """The graph as arrays."""
        if self._packed is None:
            self._packed = _pack(self)
            if self._repeated[1] > 1:
                self._packed = _repeated(self._packed, *self._repeated)
        return self._packed

    def tables(self) -> tuple[list[Table], list[Table], list[int], list[tuple[int, int, int]]]:
        """Distinct node tables and edge tables; of each node its table; (low, high, table)."""
        return self._node_tables.all, self._edge_tables.all, self._nodes, self._edges


def _pack(graph: CostGraph) -> PackedGraph:
    node_tables, edge_tables, nodes, edges = graph.tables()
    n = len(nodes)
    table = np.array(nodes, np.int64)
    ends = np.array(edges, np.int64).reshape(-1, 3)
    low, high, edge_table = ends[:, 0], ends[:, 1], ends[:, 2]
    # A source moves to its first neighbour: parameters are often listed before the program.
    order = np.arange(n)
    first = np.full(n, n)
    np.minimum.at(first, low, high)
    is_source = np.ones(n, bool)
    is_source[high] = False
    place = np.where(is_source & (first < n), first, order)
    origin = np.lexsort((order, ~is_source, place))
    number = np.empty(n, np.int64)
    number[origin] = order
    low, high = number[low], number[high]
    edge_tables = list(edge_tables)
    swapped = low > high
    turned, places = np.unique(edge_table[swapped], return_inverse=True)
    edge_table[swapped] = len(edge_tables) + places
    edge_tables += [edge_tables[old].transposed for old in turned]
    low, high = np.minimum(low, high), np.maximum(low, high)
    by = np.lexsort((edge_table, low, high))
    low, high, edge_table = low[by], high[by], edge_table[by]
    low, high, edge_table = _without_parallels(low, high, edge_table, edge_tables)
    strategies = [np.arange(len(entry.cost)) for entry in node_tables]
    return PackedGraph(
        list(node_tables), edge_tables, table[origin], low, high, edge_table, origin, strategies
    )


def _without_parallels(
    low: Integers, high: Integers, edge_table: Integers, tables: list[Table]
) -> tuple[Integers, Integers, Integers]:
    """Edges sorted by (high, low); those between the same two nodes are added up."""
    same = np.zeros(len(low), bool)
    same[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    if not same.any():
        return low, high, edge_table
    sums: dict[tuple[int, ...], int] = {}
    heads = np.flatnonzero(~same)
    merged = edge_table[heads].copy()
    for at, (start, stop) in enumerate(zip(heads, [*heads[1:], len(low)])):
        if stop - start > 1:
            parts = tuple(int(number) for number in edge_table[start:stop])
            if parts not in sums:
                total = tables[parts[0]]
                for part in parts[1:]:
                    total = total.plus(tables[part])
                sums[parts] = len(tables)
                tables.append(total)
            merged[at] = sums[parts]
    return low[heads], high[heads], merged


class UnequalBlocks(InvalidInput):
    """A block stands for several, but is not like those beside it."""


def _repeated(packed: PackedGraph, nodes: Sequence[int], times: int) -> PackedGraph:
    """The graph in which a block, `nodes` of the caller, comes so many times in a row."""
    inside = np.flatnonzero(np.isin(packed.origin, np.array(nodes, np.int64)))
    start, period = int(inside[0]), len(inside)
    if not _is_between_equals(packed, start, period) or inside[-1] != start + period - 1:
        raise UnequalBlocks(
            "a block that stands for several has an equal one on each side",
            got=f"nodes {start} to {int(inside[-1])}, {period} of them",
            remedy="give the whole graph",
        )
    end, more = start + period, period * (times - 1)
    steps = period * np.arange(times)
    node = np.concatenate([np.arange(end), np.tile(np.arange(start, end), times - 1)])
    node = np.concatenate([node, np.arange(end, len(packed))])
    is_of = (packed.high >= start) & (packed.high < end)
    # What a block reads of the one before comes with it, what all read does not.
    follows = packed.low >= start - period
    low, high = packed.low + more * (packed.low >= start), packed.high + more
    low, high = low[packed.high >= end], high[packed.high >= end]
    copies = packed.low[is_of, None] + steps * follows[is_of, None]
    before = packed.high < start
    edges = [
        np.concatenate([packed.low[before], copies.ravel(), low]),
        np.concatenate([packed.high[before], (packed.high[is_of, None] + steps).ravel(), high]),
        np.concatenate(
            [
                packed.edge_table[before],
                np.repeat(packed.edge_table[is_of], times),
                packed.edge_table[packed.high >= end],
            ]
        ),
    ]
    by = np.lexsort((edges[2], edges[0], edges[1]))
    low, high, table = (array[by] for array in edges)
    row = BlockRow(start, period, times)
    made = replace(packed, node_table=packed.node_table[node], origin=packed.origin[node], row=row)
    return replace(made, low=low, high=high, edge_table=table)


def _is_between_equals(packed: PackedGraph, start: int, period: int) -> bool:
    """Whether the blocks before and after have the same nodes, and edges from where they follow."""

    def block(at: int) -> list[tuple[int, ...]] | None:
        if at < period or at + period > len(packed):
            return None
        own = (packed.high >= at) & (packed.high < at + period)
        low, high = packed.low[own], packed.high[own] - at
        near = low >= at - period
        rows = zip(high.tolist(), near.tolist(), (low - at * near).tolist())
        tables = packed.edge_table[own].tolist()
        nodes = packed.node_table[at : at + period].tolist()
        return [*sorted((*row, table) for row, table in zip(rows, tables)), tuple(nodes)]

    blocks = [block(start + step * period) for step in (-1, 0, 1)]
    return None not in blocks and blocks[0] == blocks[1] == blocks[2]
