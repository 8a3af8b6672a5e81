"""Reduce a chain of equal blocks to one table: the min-plus power of one block's table.

>>> step = np.array([[[0.0, 5.0], [1.0, 3.0]]])  # (shared, into the block, out of it)
>>> power = MinPlusPower(step, 4)
>>> power.table[0, 1]
array([1., 6.])
>>> power.states(0, 1, 1)  # the states between the blocks on the cheapest way from 1 to 1
[1, 0, 0, 0, 1]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.solver.elimination import LIMIT, Elimination, least_product
from autopar.solver.fold import BlockRun, interface_entries
from autopar.solver.packed_graph import Array, Integers, PackedGraph

_MOST_WORK = 1 << 30  # additions in one product of block matrices
_MOST_ENTRIES = 1 << 23  # of a block matrix


class MinPlusPower:
    """Raise a block matrix (shared x in x out) to the power `count`; remember the way through."""

    def __init__(self, step: Array, count: int) -> None:
        self.count = count
        self._powers = {1: step}
        self.table = self._power(count)

    def _power(self, count: int) -> Array:
        if count not in self._powers:
            first, last = _halves(count)
            self._powers[count] = least_product(self._power(first), self._power(last))
        return self._powers[count]

    @property
    def step(self) -> Array:
        """Return the block matrix."""
        return self._powers[1]

    def states(self, shared: int, first: int, last: int) -> list[int]:
        """Return the states between the blocks on the cheapest way, both ends with them."""
        return [first, *self._inside(self.count, shared, first, last)]

    def _inside(self, count: int, shared: int, first: int, last: int) -> list[int]:
        """Return the states after `first` up to `last` through `count` blocks."""
        if count == 1:
            return [last]
        before, after = _halves(count)
        ways = self._powers[before][shared, first] + self._powers[after][shared, :, last]
        middle = int(np.argmin(ways))
        return [
            *self._inside(before, shared, first, middle),
            *self._inside(after, shared, middle, last),
        ]


def _halves(count: int) -> tuple[int, int]:
    """Return two parts of a power, the second the largest power of two that leaves something."""
    last = 1 << ((count - 1).bit_length() - 1)
    return count - last, last


class Chain:
    """Hold the structure of one run of equal blocks, to reduce it under any weights."""

    def __init__(self, packed: PackedGraph, run: BlockRun, limit: int = LIMIT) -> None:
        self.packed, self.run, self.limit = packed, run, limit
        # The second block stands for all: what comes in are nodes of the first.
        begin = run.start + run.period
        self._block = range(begin, begin + run.period)
        self._in = [run.start + position for position in run.crossing]
        self._out = [begin + position for position in run.crossing]
        variables = [*self._block, *self._in, *run.shared]
        self._sizes = {v: int(packed.sizes[v]) for v in variables}
        touched = np.isin(packed.low, self._block) | np.isin(packed.high, self._block)
        edges = [packed.edges[e] for e in np.flatnonzero(touched)]
        self._edges = [e for e in edges if e[0] in self._sizes and e[1] in self._sizes]
        self.shared_entries, self.entries = interface_entries(packed, run)

    @classmethod
    def worthwhile(cls, packed: PackedGraph, run: BlockRun) -> bool:
        """Return whether the block matrix and its powers stay small."""
        shared, entries = interface_entries(packed, run)
        return shared * entries**2 <= _MOST_ENTRIES and shared * entries**3 <= _MOST_WORK

    @property
    def scope(self) -> tuple[int, ...]:
        """Return the nodes of the graph that the table is over."""
        return (*self.run.shared, *self.run.inputs, *self.run.outputs)

    def reduce(self, nodes: list[Array], edges: list[Array]) -> ReducedChain | None:
        """Return the table for these node and edge weights; `None` if a block is tangled."""
        elimination, ends = self.block(nodes, edges), self.ends
        if len(elimination.order(keep=ends)) + len(ends) < len(self._sizes):
            return None
        elimination.run(keep=ends)
        step = elimination.joint(ends).reshape(self.shared_entries, self.entries, self.entries)
        return ReducedChain(self, elimination, MinPlusPower(step, self.run.count))

    @property
    def sides(self) -> list[Sequence[int]]:
        """Return the nodes that one block and others see: the shared ones, those of the block
        before that cross into it, and those of it that cross into the next."""
        return [self.run.shared, self._in, self._out]

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the nodes of all sides."""
        return (*self.run.shared, *self._in, *self._out)

    def block(self, nodes: list[Array], edges: list[Array]) -> Elimination:
        """Return the tables of one block, with nothing eliminated."""
        elimination = Elimination(self._sizes, self.limit)
        for node in self._block:
            elimination.add((node,), nodes[self.packed.node_table[node]])
        for low, high, table in self._edges:
            elimination.add((low, high), edges[table])
        return elimination

    def block_memory(self) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yield the bytes of one block, by the nodes that they depend on."""
        for node in self._block:
            if (memory := self.packed.node_tables[self.packed.node_table[node]].memory) is not None:
                yield (node,), memory
        for low, high, table in self._edges:
            if (memory := self.packed.edge_tables[table].memory) is not None:
                yield (low, high), memory

    def state(self, nodes: Sequence[int], values: Mapping[int, Integers]) -> Integers:
        """Return the number of the strategies of some nodes together, for many choices."""
        number: Integers = np.zeros(1, np.int64)
        for node in nodes:
            number = number * int(self.packed.sizes[node]) + values[node]
        return number

    def write(self, choice: Integers, block: int, strategies: Mapping[int, int]) -> None:
        """Write the strategies of one block, told of that which stands for all, to a choice."""
        begin = self.run.start + block * self.run.period
        choice[begin : begin + self.run.period] = [strategies[v] for v in self._block]

    def complete(self, reduced: ReducedChain, choice: Integers) -> None:
        """Write the choice of every block, given those of the nodes in `scope`."""
        run = self.run

        def state(nodes: Sequence[int]) -> int:
            return _flat([int(choice[v]) for v in nodes], self._sizes_of(nodes))

        states = reduced.power.states(state(run.shared), state(run.inputs), state(run.outputs))
        known: dict[tuple[int, int], Integers] = {}
        for block, pair in enumerate(pairwise(states)):
            if pair not in known:
                ends = {v: int(choice[v]) for v in run.shared}
                for nodes, number in zip((self._in, self._out), pair):
                    ends |= dict(zip(nodes, _split(number, self._sizes_of(nodes))))
                done = reduced.elimination.complete(ends)
                known[pair] = np.array([done[v] for v in self._block], np.int64)
            begin = run.start + block * run.period
            choice[begin : begin + run.period] = known[pair]

    def _sizes_of(self, nodes: Sequence[int]) -> list[int]:
        return [int(self.packed.sizes[v]) for v in nodes]


class ReducedChain(NamedTuple):
    """Hold a chain's table under given weights, and what completes a choice."""

    chain: Chain
    elimination: Elimination
    power: MinPlusPower  # its table is over the chain's scope, in rows


def _flat(values: list[int], sizes: list[int]) -> int:
    """Return the row of a table over so many nodes, which may be more than numpy has dims."""
    row = 0
    for value, size in zip(values, sizes):
        row = row * size + value
    return row


def _split(row: int, sizes: list[int]) -> list[int]:
    """Return the values that `_flat` was given."""
    values: list[int] = []
    for size in reversed(sizes):
        row, value = divmod(row, size)
        values.append(value)
    return values[::-1]
