"""Near optima of a chain of equal blocks: how many are treated in one way, and how many in others.

The near optima of a block, between any two states, are listed once for all. Ways through the chain
are put together from them, block after block. What the rest takes at least is known for each state,
so that only ways of little excess are followed; of those that meet, only the undominated ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.solver.chain import ReducedChain
from autopar.solver.elimination import Elimination
from autopar.solver.near_optima import (
    ChoiceRows,
    Ends,
    Nearness,
    TooManyRows,
    matches,
    near_optima,
    undominated,
)
from autopar.solver.packed_graph import Array, Integers

_MOST_WORK = 1 << 27  # additions, to find what the rest of a chain takes
_MOST_WAYS = 1 << 12  # that are followed from one block to the next
_MOST_FOLLOWED = 1 << 21  # through all blocks
_STATE, _BEFORE, _OPTION = range(3)  # columns of a way: where it is, where it was, by which row


class _WaysFrom(NamedTuple):
    """Hold what is known of the ways that begin with some shared strategies, in some state."""

    shared: int
    state: int
    rest: Array  # [blocks done, state]: the least weight of what follows, to the end of the graph


@dataclass
class NearChain:
    """List the near optima of one chain; `best` is the least weight of the whole graph.

    A way stands for others that cost less than it by at most `lost` in the end, about `coarse`."""

    reduced: ReducedChain
    block: Elimination  # its tables, nothing eliminated yet
    near: Nearness
    best: float
    coarse: float = 0.0

    def __post_init__(self) -> None:
        self.variable = -1 - self.reduced.chain.run.start  # its way, among the variables of rows
        self.lost, self._followed_ways = 0.0, 0
        self._ways: list[
            tuple[list[ChoiceRows], int]
        ] = []  # rows after each block, the row of the last

    def rows(self, scope: ChoiceRows, totals: Array) -> ChoiceRows:
        """Return the ways between states. `scope` has strategies of the nodes that the chain's
        table is over, and `totals` the least weight of the whole graph with them."""
        chain, table = self.reduced.chain, self.reduced.power.table
        columns = dict(zip(scope.variables, scope.values.T))
        states = [
            np.broadcast_to(chain.state(nodes, columns), len(scope))
            for nodes in (chain.run.shared, chain.run.inputs, chain.run.outputs)
        ]
        outside = np.full(table.shape, np.inf)
        outside[*states] = totals - table[*states]
        pairs = sorted({*zip(states[0].tolist(), states[1].tolist())})
        if len(pairs) * chain.run.count * table.shape[-1] ** 2 > _MOST_WORK:
            raise TooManyRows
        starts = [_WaysFrom(g, a, self._rest(g, outside[g, a])) for g, a in pairs]
        self.options = self._near_blocks(starts)
        numbers = np.ravel_multi_index(tuple(states), table.shape)
        order, listed = np.argsort(numbers, kind="stable"), []
        for start in starts:
            steps = self._followed(start)
            ways, first = steps[-1], len(self._ways)
            self._ways += [(steps, way) for way in range(len(ways))]
            begin = (start.shared * table.shape[1] + start.state) * table.shape[2]
            way, place = matches(begin + ways.values[:, _STATE], numbers[order])
            place = order[place]
            excess = np.maximum(ways.excess[way] - (totals[place] - self.best), 0.0)
            values = np.column_stack([scope.values[place], first + way])
            variables = (*scope.variables, self.variable)
            listed.append(ChoiceRows(variables, values, excess, ways.memory[way]))
        return ChoiceRows.together(listed)

    def complete(self, way: int, choice: Integers) -> None:
        """Write the strategies of all blocks on a way."""
        steps, row = self._ways[way]
        for block in range(len(steps) - 2, -1, -1):
            _, row_before, option = steps[block + 1].values[row].tolist()
            strategies = dict(zip(self.options.variables, self.options.values[option].tolist()))
            self.reduced.chain.write(choice, block, strategies)
            row = row_before

    def _rest(self, shared: int, outside: Array) -> Array:
        """Return the least weight after each number of blocks, in each state."""
        rest, step = [outside], self.reduced.power.step[shared]
        for _ in range(self.reduced.chain.run.count):
            rest.append((step + rest[-1]).min(axis=1))
        return np.array(rest[::-1])

    def _through(self, start: _WaysFrom) -> Array:
        """Return the least weight of all with a block between two states, wherever that stands."""
        step = self.reduced.power.step[start.shared]
        through = np.full(step.shape, np.inf)
        before = np.where(np.arange(len(step)) == start.state, 0.0, np.inf)
        for rest in start.rest[1:]:
            ways = before[:, None] + step
            np.minimum(through, ways + rest, out=through)
            before = ways.min(axis=0)
        return through

    def _near_blocks(self, starts: list[_WaysFrom]) -> ChoiceRows:
        """Return the near optima of a block, between any states that it may stand between."""
        chain, step = self.reduced.chain, self.reduced.power.step
        through = np.full(step.shape, np.inf)
        for start in starts:
            np.minimum(through[start.shared], self._through(start), out=through[start.shared])
        places = np.flatnonzero(through.reshape(-1) - self.best <= self.near.most)
        outside = np.full(step.size, np.inf)
        outside[places] = through.reshape(-1)[places] - step.reshape(-1)[places]
        sizes = self.block.sizes
        ends = ChoiceRows.of_places(chain.ends, places, sizes)
        closed = self.block
        closed.add(chain.ends, outside.reshape([sizes[v] for v in chain.ends]))
        closed.run(keep=chain.ends)
        closed.run()
        known = Ends(ends, through.reshape(-1)[places] - self.best)
        rows = near_optima(closed, chain.block_memory(), self.near, ends=known)
        columns = dict(zip(rows.variables, rows.values.T))
        shared, before, self._after = (
            np.broadcast_to(chain.state(nodes, columns), len(rows)) for nodes in chain.sides
        )
        self._before = shared * step.shape[-1] + before
        order = np.argsort(self._before, kind="stable")
        self._before, self._after = self._before[order], self._after[order]
        return rows.at(order)

    def _followed(self, start: _WaysFrom) -> list[ChoiceRows]:
        """Return the undominated ways after each number of blocks; their excess is that of all."""
        step, near = self.reduced.power.step, self.near
        base = start.shared * step.shape[-1]
        first = np.array([[start.state, 0, 0]])
        excess = np.array([start.rest[0, start.state] - self.best])
        steps = [ChoiceRows((_STATE, _BEFORE, _OPTION), first, excess, np.zeros(1))]
        lost, width = 0.0, self.coarse / self.reduced.chain.run.count
        for rest, rest_after in pairwise(start.rest):
            ways = steps[-1]
            at = ways.values[:, _STATE]
            way, option = matches(base + at, self._before)
            self._followed_ways += len(way)
            if self._followed_ways > _MOST_FOLLOWED:
                raise TooManyRows
            after = self._after[option]
            added = step[start.shared, at[way], after] + rest_after[after] - rest[at[way]]
            excess = ways.excess[way] + added + self.options.excess[option]
            memory = ways.memory[way] + self.options.memory[option]
            is_near = excess <= near.most
            values = np.column_stack([after, way, option])[is_near]
            ways_after = ChoiceRows(ways.variables, values, excess[is_near], memory[is_near])
            followed = undominated(ways_after, values[:, _STATE], near, width)
            lost += width
            while len(followed) > _MOST_WAYS:
                width = max(2 * width, near.most / _MOST_WAYS)
                followed = undominated(followed, followed.values[:, _STATE], near, width)
                lost += width
            steps.append(followed)
        self.lost = max(self.lost, lost)
        return steps


def near_scope(
    elimination: Elimination, scope: tuple[int, ...], most: float
) -> tuple[ChoiceRows, Array]:
    """Return the strategies of the nodes in a scope that are part of near optima, and the least
    weight of all with them."""
    sizes = elimination.sizes
    opened = [*dict.fromkeys(v for v in scope if sizes[v] > 1)]
    place = {v: at for at, (v, _) in enumerate(elimination.trail)}
    first = min(opened, key=place.__getitem__, default=None)
    over, total = tuple[int, ...](), np.array(elimination.constant)
    if opened:
        over, total = next(entry for entry in elimination.totals() if entry[0][0] == first)
    summed = tuple(dim for dim, v in enumerate(over) if v not in opened)
    least = total.min(axis=summed).reshape(-1) if opened else total.reshape(-1)
    places = np.flatnonzero(least - elimination.constant <= most)
    rows = ChoiceRows.of_places(tuple(v for v in over if v in opened), places, sizes)
    missing = [v for v in dict.fromkeys(scope) if v not in rows.variables]
    zeros = np.zeros((len(rows), len(missing)), np.int64)
    values = np.concatenate([rows.values, zeros], axis=1)
    return ChoiceRows((*rows.variables, *missing), values, rows.excess, rows.memory), least[places]
