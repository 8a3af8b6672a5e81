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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import InvalidInput

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds, and bytes where there are any, of each strategy or each pair of strategies."""

    cost: Array
    memory: Array | None

    def weighted(self, multiplier: float) -> Array:
        """cost + multiplier · memory; with an infinite multiplier, memory alone."""
        if np.isinf(multiplier):
            memory = np.zeros_like(self.cost) if self.memory is None else self.memory
            return np.where(np.isinf(self.cost), np.inf, memory)
        if self.memory is None or multiplier == 0:
            return self.cost
        return self.cost + multiplier * self.memory

    def plus(self, other: Table) -> Table:
        memories = [table.memory for table in (self, other) if table.memory is not None]
        return Table(self.cost + other.cost, sum(memories[1:], memories[0]) if memories else None)

    @cached_property
    def transposed(self) -> Table:
        memory = None if self.memory is None else np.ascontiguousarray(self.memory.T)
        return Table(np.ascontiguousarray(self.cost.T), memory)

    def taken(self, *kept: Integers) -> Table:
        """Only the strategies `kept` of each dim."""
        where = np.ix_(*kept)
        return Table(self.cost[where], None if self.memory is None else self.memory[where])


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
        self._packed: Packed | None = None

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

    def strategies(self, node: int) -> int:
        """How many strategies `node` has."""
        return len(self._node_tables.all[self._nodes[node]].cost)

    def evaluate(self, choice: Sequence[int] | Integers) -> tuple[float, float]:
        """Seconds and bytes when node i takes strategy choice[i]."""
        packed = self.packed
        return packed.evaluate(np.asarray(choice, np.int64)[packed.origin])

    @property
    def packed(self) -> Packed:
        """The graph as arrays."""
        if self._packed is None:
            self._packed = _pack(self)
        return self._packed

    def tables(self) -> tuple[list[Table], list[Table], list[int], list[tuple[int, int, int]]]:
        """Distinct node tables and edge tables; of each node its table; (low, high, table)."""
        return self._node_tables.all, self._edge_tables.all, self._nodes, self._edges


@dataclass(frozen=True, eq=False)
class Packed:
    """A graph as arrays: nodes and edges by the numbers of their tables, low < high, no parallels.

    Nodes are numbered in the order of the program, a source standing next to its first use;
    `origin[i]` is what the caller calls node i, `strategy[t][s]` what it calls strategy s of a
    node with table t."""

    node_tables: list[Table]
    edge_tables: list[Table]
    node_table: Integers
    low: Integers
    high: Integers
    edge_table: Integers
    origin: Integers
    strategy: list[Integers]

    def __len__(self) -> int:
        return len(self.node_table)

    @cached_property
    def sizes(self) -> Integers:
        """How many strategies each node has."""
        of_table = np.array([len(table.cost) for table in self.node_tables] or [0], np.int64)
        return of_table[self.node_table]

    @cached_property
    def edges(self) -> list[tuple[int, int, int]]:
        """(low, high, table) of each edge."""
        return list(zip(self.low.tolist(), self.high.tolist(), self.edge_table.tolist()))

    @cached_property
    def _flat(self) -> tuple[_Flat, _Flat]:
        return _Flat.of(self.node_tables), _Flat.of(self.edge_tables)

    def terms(
        self, choice_low: Integers, choice_high: Integers | None = None
    ) -> tuple[Array, Array]:
        """(seconds, bytes) of each edge, its low node choosing by the first, its high by the
        second vector; without a second vector, of each node."""
        nodes, edges = self._flat
        if choice_high is None:
            return nodes.take(self.node_table, choice_low, None)
        return edges.take(self.edge_table, choice_low[self.low], choice_high[self.high])

    def evaluate(self, choice: Integers) -> tuple[float, float]:
        """Seconds and bytes of a choice of strategies."""
        node_cost, node_memory = self.terms(choice)
        edge_cost, edge_memory = self.terms(choice, choice)
        return (
            float(node_cost.sum() + edge_cost.sum()),
            float(node_memory.sum() + edge_memory.sum()),
        )

    @cached_property
    def around(self) -> list[list[tuple[int, Table]]]:
        """Of each node its edges: the other end, and the table with the node's own in the rows."""
        found: list[list[tuple[int, Table]]] = [[] for _ in range(len(self))]
        for low, high, number in self.edges:
            found[low].append((high, self.edge_tables[number]))
        for low, high, number in self.edges:
            found[high].append((low, self.edge_tables[number].transposed))
        return found

    def tables_by_scope(self) -> Iterator[tuple[tuple[int, ...], Table]]:
        """The table of each node and of each edge."""
        for node, number in enumerate(self.node_table.tolist()):
            yield (node,), self.node_tables[number]
        for low, high, number in self.edges:
            yield (low, high), self.edge_tables[number]

    def weights(self, multiplier: float) -> Iterator[tuple[tuple[int, ...], Array]]:
        """cost + multiplier · memory of each node and of each edge."""
        weighted = {t: t.weighted(multiplier) for t in self.node_tables + self.edge_tables}
        for scope, table in self.tables_by_scope():
            yield scope, weighted[table]

    def translated(self, choice: Integers, other: Packed) -> Integers:
        """A choice of this graph in the numbers of `other`, which has all its strategies."""
        answer = np.empty(len(self), np.int64)
        pairs = self.node_table * len(other.node_tables) + other.node_table
        for pair in np.unique(pairs).tolist():
            own, theirs = divmod(pair, len(other.node_tables))
            where = pairs == pair
            places = np.searchsorted(other.strategy[theirs], self.strategy[own])
            answer[where] = places[choice[where]]
        return answer

    def original(self, choice: Integers) -> Integers:
        """The choice in the numbers of the caller."""
        answer = np.zeros(len(self), np.int64)
        for table in np.unique(self.node_table):
            where = self.node_table == table
            answer[self.origin[where]] = self.strategy[table][choice[where]]
        return answer

    @cached_property
    def strategy_pairs(self) -> int:
        """Entries of all nodes and edges."""
        edges = np.array([table.cost.size for table in self.edge_tables] or [0], np.int64)
        return int(self.sizes.sum() + edges[self.edge_table].sum())


@dataclass(frozen=True, eq=False)
class _Flat:
    """All tables end to end, so that one indexing takes an entry of each of many."""

    cost: Array
    memory: Array
    start: Integers
    columns: Integers

    @classmethod
    def of(cls, tables: list[Table]) -> _Flat:
        costs = [table.cost.ravel() for table in tables]
        memories = [np.zeros(t.cost.size) if t.memory is None else t.memory.ravel() for t in tables]
        starts = np.cumsum([0, *(len(cost) for cost in costs)])
        columns = np.array([t.cost.shape[-1] for t in tables], np.int64)
        return cls(
            np.concatenate([*costs, np.zeros(0)]),
            np.concatenate([*memories, np.zeros(0)]),
            starts.astype(np.int64),
            columns,
        )

    def take(self, table: Integers, row: Integers, column: Integers | None) -> tuple[Array, Array]:
        at = self.start[table]
        at = at + row if column is None else at + row * self.columns[table] + column
        return self.cost[at], self.memory[at]


def _pack(graph: CostGraph) -> Packed:
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
    return Packed(
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
