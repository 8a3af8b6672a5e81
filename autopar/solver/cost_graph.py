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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from autopar.errors import InvalidInput
from autopar.solver.packed_graph import Array, BlockRun, Integers, PackedGraph, Table


class _Tables:
    """Number distinct tables. Arrays are recognised by identity first, then by content."""

    def __init__(self) -> None:
        self.all: list[Table] = []
        self._arrays: dict[int, tuple[Any, int]] = {}  # id -> (the array, so it lives; number)
        self._contents: dict[tuple[Any, ...], int] = {}
        self._values: list[Array] = []
        self._pairs: dict[tuple[int, int], int] = {}

    def add(self, cost: ArrayLike, memory: ArrayLike | None, ndim: int) -> int:
        """Return the number of a table; equal ones have one number."""
        key = (self._array(cost, ndim), -1 if memory is None else self._array(memory, ndim))
        if key not in self._pairs:
            costs, bytes_ = self._values[key[0]], None if key[1] < 0 else self._values[key[1]]
            if np.isneginf(costs).any() or (bytes_ is not None and not np.isfinite(bytes_).all()):
                raise InvalidInput(
                    "a cost is a number or +infinity, a memory is a number",
                    got=f"{np.asarray(cost).tolist()}, {np.asarray(memory).tolist()}"[:200],
                    remedy="leave out strategies that cannot be, or give them infinite cost",
                )
            if bytes_ is not None and bytes_.shape != costs.shape:
                raise InvalidInput(
                    "memory has the shape of the costs",
                    got=f"costs {costs.shape}, memory {bytes_.shape}",
                    remedy="give one number of bytes for each strategy",
                )
            if bytes_ is not None and not bytes_.any():
                bytes_ = None
            self._pairs[key] = len(self.all)
            self.all.append(Table(costs, bytes_))
        return self._pairs[key]

    def turned(self, number: int) -> int:
        """Return the number of the transposed table."""
        table = self.all[number].transposed
        return self.add(table.cost, table.memory, 2)

    def _array(self, values: ArrayLike, ndim: int) -> int:
        """Return the number of the array with these values."""
        known = self._arrays.get(id(values))
        if known is not None and known[0] is values:
            return known[1]
        array = np.array(values, dtype=np.float64, order="C")
        if array.ndim != ndim or 0 in array.shape or np.isnan(array).any():
            raise InvalidInput(
                f"costs and memory are arrays of {ndim} dims, not empty, without NaN",
                got=f"shape {array.shape}",
                remedy="a node has one number for each strategy, an edge one for each pair",
            )
        number = self._contents.setdefault((array.shape, array.tobytes()), len(self._values))
        if number == len(self._values):
            self._values.append(array)
        self._arrays[id(values)] = (values, number)
        return number


class GraphTables(NamedTuple):
    """Hold the distinct tables of a graph, and which of them each node and edge has."""

    node_tables: list[Table]
    edge_tables: list[Table]
    nodes: list[int]  # the table of each node
    edges: list[tuple[int, int, int]]  # (low, high, table)


class CostGraph:
    """Collect nodes and edges one by one; `autopar.solver.solve` finds the best choice."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._node_tables, self._edge_tables = _Tables(), _Tables()
        self._nodes: list[int] = []
        self._edges: list[tuple[int, int, int]] = []
        self._packed: PackedGraph | None = None
        self._repeated: list[tuple[Sequence[int], int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def add_node(
        self, cost: ArrayLike, memory: ArrayLike | None = None, name: str | None = None
    ) -> int:
        """Add a node of `cost[s]` seconds and `memory[s]` bytes; return its number."""
        self._packed = None
        self._nodes.append(self._node_tables.add(cost, memory, 1))
        self.names.append(f"node{len(self.names)}" if name is None else name)
        return len(self._nodes) - 1

    def add_edge(
        self, first: int, second: int, cost: ArrayLike, memory: ArrayLike | None = None
    ) -> None:
        """Add an edge of `cost[s, t]` seconds if `first` takes strategy s, `second` t."""
        self._packed = None
        number = self._edge_tables.add(cost, memory, 2)
        shape = self._edge_tables.all[number].cost.shape
        if first == second or not (0 <= first < len(self) and 0 <= second < len(self)):
            raise InvalidInput(
                "an edge joins two different nodes of the graph",
                got=f"{first} and {second} of {len(self)} nodes",
                remedy="a node's dealings with itself belong to its own cost",
            )
        if shape != (self.strategies(first), self.strategies(second)):
            raise InvalidInput(
                "an edge has a cost for each pair of strategies of its two nodes",
                got=f"shape {shape} between {self.names[first]!r} with {self.strategies(first)} "
                f"and {self.names[second]!r} with {self.strategies(second)} strategies",
                remedy="rows are of the first node, columns of the second",
            )
        if first > second:
            first, second, number = second, first, self._edge_tables.turned(number)
        self._edges.append((first, second, number))

    def repeat(self, nodes: Sequence[int], times: int) -> None:
        """Let these nodes, a block between equal blocks, stand for `times` blocks, behind those
        that are repeated before. A choice is then the same in all of these."""
        self._packed = None
        self._repeated.append((nodes, times))

    def strategies(self, node: int) -> int:
        """Return the number of strategies of `node`."""
        return len(self._node_tables.all[self._nodes[node]].cost)

    def evaluate(self, choice: Sequence[int] | Integers) -> tuple[float, float]:
        """Return seconds and bytes when node i takes strategy choice[i]."""
        packed = self.packed
        return packed.evaluate(np.asarray(choice, np.int64)[packed.origin])

    @property
    def packed(self) -> PackedGraph:
        """Return the graph as arrays; built once."""
        if self._packed is None:
            self._packed = _pack(self)
            for nodes, times in self._repeated:
                self._packed = _repeated(self._packed, nodes, times)
        return self._packed

    def tables(self) -> GraphTables:
        """Return the nodes and edges as they were added."""
        return GraphTables(self._node_tables.all, self._edge_tables.all, self._nodes, self._edges)


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
    position = np.where(is_source & (first < n), first, order)
    origin = np.lexsort((order, ~is_source, position))
    new_number = np.empty(n, np.int64)
    new_number[origin] = order
    low, high = new_number[low], new_number[high]
    edge_tables = list(edge_tables)
    swapped = low > high
    turned, turned_index = np.unique(edge_table[swapped], return_inverse=True)
    edge_table[swapped] = len(edge_tables) + turned_index
    edge_tables += [edge_tables[old].transposed for old in turned]
    low, high = np.minimum(low, high), np.maximum(low, high)
    sorting = np.lexsort((edge_table, low, high))
    rows = np.stack([low, high, edge_table])[:, sorting]
    low, high, edge_table = _without_parallels(rows, edge_tables)
    strategies = [np.arange(len(entry.cost)) for entry in node_tables]
    return PackedGraph(
        list(node_tables), edge_tables, table[origin], low, high, edge_table, origin, strategies
    )


def _without_parallels(edges: Integers, tables: list[Table]) -> Integers:
    """Add up edges between the same two nodes; the rows are low, high and table, sorted."""
    low, high, edge_table = edges
    is_parallel = np.zeros(len(low), bool)
    is_parallel[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    if not is_parallel.any():
        return edges
    sums: dict[tuple[int, ...], int] = {}
    heads = np.flatnonzero(~is_parallel)
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
    return np.stack([low[heads], high[heads], merged])


def _repeated(packed: PackedGraph, nodes: Sequence[int], times: int) -> PackedGraph:
    """Return the graph in which a block, `nodes` of the caller, comes `times` times in a row."""
    members = np.flatnonzero(np.isin(packed.origin, np.array(nodes, np.int64)))
    start, period = int(members[0]), len(members)
    if not _is_between_equals(packed, start, period) or members[-1] != start + period - 1:
        raise InvalidInput(
            "a block that stands for several has an equal one on each side",
            got=f"nodes {start} to {int(members[-1])}, {period} of them",
            remedy="give the whole graph",
        )
    end, more = start + period, period * (times - 1)
    steps = period * np.arange(times)
    node = np.concatenate([np.arange(end), np.tile(np.arange(start, end), times - 1)])
    node = np.concatenate([node, np.arange(end, len(packed))])
    is_inside = (packed.high >= start) & (packed.high < end)
    # What a block reads of the one before comes with it, what all read does not.
    moves = packed.low >= start - period
    low, high = packed.low + more * (packed.low >= start), packed.high + more
    low, high = low[packed.high >= end], high[packed.high >= end]
    copies = packed.low[is_inside, None] + steps * moves[is_inside, None]
    before = packed.high < start
    edges = [
        np.concatenate([packed.low[before], copies.ravel(), low]),
        np.concatenate([packed.high[before], (packed.high[is_inside, None] + steps).ravel(), high]),
        np.concatenate(
            [
                packed.edge_table[before],
                np.repeat(packed.edge_table[is_inside], times),
                packed.edge_table[packed.high >= end],
            ]
        ),
    ]
    sorting = np.lexsort((edges[2], edges[0], edges[1]))
    low, high, table = (array[sorting] for array in edges)
    rows = *packed.rows, BlockRun(start, period, times)
    repeated = replace(
        packed, node_table=packed.node_table[node], origin=packed.origin[node], rows=rows
    )
    return replace(repeated, low=low, high=high, edge_table=table)


def _is_between_equals(packed: PackedGraph, start: int, period: int) -> bool:
    """Return whether the blocks before and after have equal nodes and edges."""

    def block(at: int) -> list[tuple[int, ...]] | None:
        """Return the edges and nodes of the block at `at`; `None` outside the graph."""
        if at < period or at + period > len(packed):
            return None
        is_inside = (packed.high >= at) & (packed.high < at + period)
        low, high = packed.low[is_inside], packed.high[is_inside] - at
        is_local = low >= at - period
        rows = zip(high.tolist(), is_local.tolist(), (low - at * is_local).tolist())
        tables = packed.edge_table[is_inside].tolist()
        nodes = packed.node_table[at : at + period].tolist()
        return [*sorted((*row, table) for row, table in zip(rows, tables)), tuple(nodes)]

    blocks = [block(start + step * period) for step in (-1, 0, 1)]
    return None not in blocks and blocks[0] == blocks[1] == blocks[2]
