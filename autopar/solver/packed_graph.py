"""A cost graph as arrays: the form in which the solver reads, prunes and prices it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_EQUAL = 1e-12  # relative

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """Hold seconds, and bytes if there are any, of each strategy or pair of strategies."""

    cost: Array
    memory: Array | None

    def weighted(self, multiplier: float) -> Array:
        """Return cost + multiplier · memory; memory alone if the multiplier is infinite."""
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

    def taken(self, *indices: Integers) -> Table:
        """Return the table with only the strategies `indices` of each dim."""
        selection = np.ix_(*indices)
        return Table(self.cost[selection], None if self.memory is None else self.memory[selection])


@dataclass(frozen=True)
class BlockRun:
    """`count` equal blocks of `period` nodes from node `start` on.

    The nodes at positions `crossing` of a block are all that the next block sees of it; `inputs`
    play their part for the first block. Every block may see the nodes `shared`."""

    start: int
    period: int
    count: int
    crossing: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def outputs(self) -> tuple[int, ...]:
        """The crossing nodes of the last block."""
        return tuple(self.end - self.period + position for position in self.crossing)

    @property
    def saved(self) -> int:
        """The number of nodes that need not be looked at."""
        return (self.count - 1) * self.period


@dataclass(frozen=True, eq=False)
class PackedGraph:
    """Hold a graph as arrays: nodes and edges by their tables' numbers, low < high, no parallels.

    Nodes are numbered in the order of the program, a source standing next to its first use;
    `origin[i]` is what the caller calls node i, `strategy[t][s]` what it calls strategy s of a node
    with table t."""

    node_tables: list[Table]
    edge_tables: list[Table]
    node_table: Integers
    low: Integers
    high: Integers
    edge_table: Integers
    origin: Integers
    strategy: list[Integers]
    rows: tuple[BlockRun, ...] = ()  # of equal blocks, of which the caller has one each

    def __len__(self) -> int:
        return len(self.node_table)

    @cached_property
    def sizes(self) -> Integers:
        """Return the number of strategies of each node."""
        of_table = np.array([len(table.cost) for table in self.node_tables] or [0], np.int64)
        return of_table[self.node_table]

    @cached_property
    def edges(self) -> list[tuple[int, int, int]]:
        """Return (low, high, table) of each edge."""
        return list(zip(self.low.tolist(), self.high.tolist(), self.edge_table.tolist()))

    @cached_property
    def _flat(self) -> tuple[_FlatTables, _FlatTables]:
        return _FlatTables.of(self.node_tables), _FlatTables.of(self.edge_tables)

    def terms(
        self, choice_low: Integers, choice_high: Integers | None = None
    ) -> tuple[Array, Array]:
        """Return (seconds, bytes) of each edge, or without `choice_high` of each node.
        The low node of an edge chooses by the first vector, its high node by the second."""
        nodes, edges = self._flat
        if choice_high is None:
            return nodes.take(self.node_table, choice_low, None)
        return edges.take(self.edge_table, choice_low[self.low], choice_high[self.high])

    @property
    def alone(self) -> float:
        """Return the least seconds of all nodes, without any edge."""
        least = np.array([float(table.cost.min()) for table in self.node_tables])
        return float(least[self.node_table].sum())

    def evaluate(self, choice: Integers) -> tuple[float, float]:
        """Return seconds and bytes of a choice of strategies."""
        node_cost, node_memory = self.terms(choice)
        edge_cost, edge_memory = self.terms(choice, choice)
        return (
            float(node_cost.sum() + edge_cost.sum()),
            float(node_memory.sum() + edge_memory.sum()),
        )

    @cached_property
    def around(self) -> list[list[tuple[int, Table]]]:
        """Return the edges of each node: the other end, and the table with its own rows."""
        rows: list[list[tuple[int, Table]]] = [[] for _ in range(len(self))]
        for low, high, number in self.edges:
            rows[low].append((high, self.edge_tables[number]))
        for low, high, number in self.edges:
            rows[high].append((low, self.edge_tables[number].transposed))
        return rows

    def tables_at(self, nodes: Integers) -> dict[int, list[Table]]:
        """Return the tables of the edges of some nodes, the node's own strategies in the rows."""
        tables: dict[int, list[Table]] = {node: [] for node in nodes.tolist()}
        for ends, is_low in ((self.low, True), (self.high, False)):
            places = np.flatnonzero(np.isin(ends, nodes))
            for node, number in zip(ends[places].tolist(), self.edge_table[places].tolist()):
                table = self.edge_tables[number]
                tables[node].append(table if is_low else table.transposed)
        return tables

    def tables_by_scope(self) -> Iterator[tuple[tuple[int, ...], Table]]:
        """Yield the table of each node and of each edge."""
        for node, number in enumerate(self.node_table.tolist()):
            yield (node,), self.node_tables[number]
        for low, high, number in self.edges:
            yield (low, high), self.edge_tables[number]

    def weights(self, multiplier: float) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yield cost + multiplier · memory of each node and of each edge."""
        weighted = {t: t.weighted(multiplier) for t in self.node_tables + self.edge_tables}
        for scope, table in self.tables_by_scope():
            yield scope, weighted[table]

    def translated(self, choice: Integers, other: PackedGraph) -> Integers:
        """Return a choice of this graph in the numbers of `other`, which has all its strategies."""
        answer = np.empty(len(self), np.int64)
        pairs = self.node_table * len(other.node_tables) + other.node_table
        for pair in np.unique(pairs).tolist():
            table, other_table = divmod(pair, len(other.node_tables))
            members = pairs == pair
            places = np.searchsorted(other.strategy[other_table], self.strategy[table])
            answer[members] = places[choice[members]]
        return answer

    def original(self, choice: Integers) -> Integers:
        """Return the choice in the numbers of the caller; for a row of blocks that of the last."""
        answer = np.zeros(int(self.origin.max(initial=-1)) + 1, np.int64)
        for table in np.unique(self.node_table):
            members = self.node_table == table
            answer[self.origin[members]] = self.strategy[table][choice[members]]
        return answer

    def alike(self, choice: Integers, limit: float) -> Integers:
        """Return the best choice within `limit` that is equal in all blocks of each row.
        Each is taken from a block of `choice`. If none is within the limit: the nearest to it."""
        for row in self.rows:
            options = []
            blocks = np.unique(choice[row.start : row.end].reshape(row.count, -1), axis=0)
            for block in blocks if len(blocks) > 1 else ():
                option = choice.copy()
                option[row.start : row.end] = np.tile(block, row.count)
                seconds, size = self.evaluate(option)
                options.append(((max(0.0, size - limit), seconds), option))
            best = min(options, key=lambda way: way[0])[1] if options else choice
            choice = self._spread(row, best, limit)
        return choice

    def _spread(self, row: BlockRun, choice: Integers, limit: float) -> Integers:
        """Copy a row's strategies to the equal blocks next to it, where that is as good."""
        start, period, count = row.start, row.period, row.count
        block_tables = self.node_table[start : start + period]
        block = choice[start : start + period]
        seconds, size = self.evaluate(choice)
        for direction, first in ((-1, start), (1, start + period * (count - 1))):
            at = first + direction * period
            while at >= 0 and np.array_equal(self.node_table[at : at + period], block_tables):
                extended = choice.copy()
                extended[at : at + period] = block
                totals = self.evaluate(extended)
                if totals[0] > seconds * (1 + _EQUAL) or totals[1] > max(size, limit):
                    break
                choice, at = extended, at + direction * period
        return choice

    @cached_property
    def strategy_pairs(self) -> int:
        """Return the number of entries of all nodes and edges."""
        edges = np.array([table.cost.size for table in self.edge_tables] or [0], np.int64)
        return int(self.sizes.sum() + edges[self.edge_table].sum())


@dataclass(frozen=True, eq=False)
class _FlatTables:
    """Hold all tables end to end, so that one indexing takes an entry of each of many."""

    cost: Array
    memory: Array
    start: Integers
    columns: Integers

    @classmethod
    def of(cls, tables: list[Table]) -> _FlatTables:
        """Join `tables` into one array each of seconds and bytes."""
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
        """Return (seconds, bytes) of one entry of each of many tables."""
        at = self.start[table]
        at = at + row if column is None else at + row * self.columns[table] + column
        return self.cost[at], self.memory[at]
