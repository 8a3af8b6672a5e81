"""A chain of equal blocks as one table: a block is reduced once, the chain is its min-plus power.

>>> step = np.array([[[0.0, 5.0], [1.0, 3.0]]])  # (shared, into the block, out of it)
>>> power = Power(step, 4)
>>> power.table[0, 1]
array([1., 6.])
>>> power.states(0, 1, 1)  # what lies between the blocks on the cheapest way from 1 to 1
[1, 0, 0, 0, 1]
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from autopar.solver.eliminate import LIMIT, Elimination, least_product
from autopar.solver.fold import Run, interface_entries, nodes_of
from autopar.solver.graph import Array, Integers, Packed

_MOST_WORK = 1 << 30  # additions in one product of block matrices
_MOST_ENTRIES = 1 << 23  # of a block matrix


class Power:
    """`count` applications of a block matrix (shared x in x out), and the way through them."""

    def __init__(self, step: Array, count: int) -> None:
        self._squares = [step]
        self._partial: list[tuple[Array, int]] = []  # product so far, the square it ends with
        table: Array | None = None
        for bit in range(count.bit_length()):
            if bit:
                self._squares.append(least_product(self._squares[-1], self._squares[-1]))
            if count >> bit & 1:
                if table is None:
                    table = self._squares[bit]
                else:
                    table = least_product(table, self._squares[bit])
                self._partial.append((table, bit))
        assert table is not None
        self.table: Array = table

    def states(self, shared: int, first: int, last: int) -> list[int]:
        """The states between the blocks, both ends with them."""
        way: list[int] = []
        for at in range(len(self._partial) - 1, -1, -1):
            middle = first
            if at:
                before, square = self._partial[at - 1][0], self._squares[self._partial[at][1]]
                middle = int(np.argmin(before[shared, first] + square[shared, :, last]))
            way = self._inside(self._partial[at][1], shared, middle, last) + way
            last = middle
        return [first, *way]

    def _inside(self, bit: int, shared: int, first: int, last: int) -> list[int]:
        """The states after `first` up to `last` through one square."""
        if bit == 0:
            return [last]
        half = self._squares[bit - 1]
        middle = int(np.argmin(half[shared, first] + half[shared, :, last]))
        return self._inside(bit - 1, shared, first, middle) + self._inside(
            bit - 1, shared, middle, last
        )


class Chain:
    """The structure of one run, and its table under given weights."""

    def __init__(self, packed: Packed, run: Run, limit: int = LIMIT) -> None:
        self.packed, self.run, self.limit = packed, run, limit
        # The second block stands for all: what comes in are nodes of the first.
        self._block = nodes_of(run, 1)
        self._in = [run.start + position for position in run.crossing]
        self._out = [run.start + run.period + position for position in run.crossing]
        members = set(self._block.tolist())
        known = members | set(self._in) | set(run.shared)
        touched = np.isin(packed.low, self._block) | np.isin(packed.high, self._block)
        edges = [packed.edges[e] for e in np.flatnonzero(touched)]
        self._edges = [edge for edge in edges if edge[0] in known and edge[1] in known]
        variables = [*self._block.tolist(), *self._in, *run.shared]
        self._sizes = {int(v): int(packed.sizes[v]) for v in variables}
        self.shared_entries, self.entries = interface_entries(packed, run)

    @classmethod
    def worthwhile(cls, packed: Packed, run: Run) -> bool:
        """Whether the block matrix and its powers stay small."""
        shared, entries = interface_entries(packed, run)
        return shared * entries**2 <= _MOST_ENTRIES and shared * entries**3 <= _MOST_WORK

    @property
    def scope(self) -> tuple[int, ...]:
        """The nodes of the graph that the table is about."""
        return (*self.run.shared, *self.run.inputs, *self.run.outputs)

    def reduce(self, nodes: list[Array], edges: list[Array]) -> Reduced | None:
        """The table for these weights of node and edge tables; None if a block is too tangled."""
        elimination = Elimination(self._sizes, self.limit)
        for node in self._block.tolist():
            elimination.add((node,), nodes[self.packed.node_table[node]])
        for low, high, table in self._edges:
            elimination.add((low, high), edges[table])
        ends = (*self.run.shared, *self._in, *self._out)
        elimination.run(keep=ends)
        if set(elimination.core) != set(ends):
            return None
        step = elimination.joint(ends).reshape(self.shared_entries, self.entries, self.entries)
        return Reduced(self, elimination, Power(step, self.run.count))

    def complete(self, reduced: Reduced, choice: Integers) -> None:
        """Write the choice of every block, given those of the nodes in `scope`."""
        run = self.run
        shared_sizes = [self._sizes[v] for v in run.shared]
        sizes = [self._sizes[v] for v in self._out]
        shared = _flat([int(choice[v]) for v in run.shared], shared_sizes)
        first = _flat([int(choice[v]) for v in run.inputs], sizes)
        last = _flat([int(choice[v]) for v in run.outputs], sizes)
        states = reduced.power.states(shared, first, last)
        known: dict[tuple[int, int], Integers] = {}
        for block, pair in enumerate(pairwise(states)):
            if pair not in known:
                ends = {v: int(choice[v]) for v in run.shared}
                ends |= dict(zip(self._in, _split(pair[0], sizes)))
                ends |= dict(zip(self._out, _split(pair[1], sizes)))
                done = reduced.elimination.complete(ends)
                known[pair] = np.array([done[v] for v in self._block.tolist()], np.int64)
            begin = run.start + block * run.period
            choice[begin : begin + run.period] = known[pair]


class Reduced:
    """A chain under given weights."""

    def __init__(self, chain: Chain, elimination: Elimination, power: Power) -> None:
        self.chain, self.elimination, self.power = chain, elimination, power

    @property
    def table(self) -> Array:
        """A dim for each node of the chain's scope."""
        sizes = self.chain.packed.sizes
        return self.power.table.reshape([int(sizes[v]) for v in self.chain.scope])


def _flat(values: list[int], sizes: list[int]) -> int:
    return int(np.ravel_multi_index(values, sizes)) if sizes else 0


def _split(value: int, sizes: list[int]) -> list[int]:
    if not sizes:
        return []
    assert value < math.prod(sizes)
    return [int(part) for part in np.unravel_index(value, sizes)]
