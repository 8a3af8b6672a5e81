"""The least cost under a memory limit: a multiplier on memory, with a certified bound.

>>> from autopar.solver.cost_graph import CostGraph
>>> graph = CostGraph()
>>> nodes = [graph.add_node([1.0, 2.0], memory=[8, 4]) for _ in range(100)]
>>> for a, b in zip(nodes, nodes[1:]):
...     graph.add_edge(a, b, [[0.0, 0.1], [0.1, 0.0]])
>>> search = LagrangianSearch(graph.packed, limit=600)
>>> search.relax(), round(search.value, 3), search.memory, search.gap <= 0.01
(True, 150.1, 600.0, True)

For every multiplier, the least of cost + multiplier · (memory - limit) is a bound. The multiplier
that gives the best bound is found where two choices, one too large and one that fits, weigh the
same; between these two lie others, made of the first nodes of one and the last nodes of the other.
If they do not close the gap, `branch_and_bound` divides the graph by the strategies of a node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import InvalidInput
from autopar.solver.cost_graph import Array, Integers, PackedGraph
from autopar.solver.cp_sat_residual import relative_gap, solve_residual
from autopar.solver.elimination import Elimination
from autopar.solver.optimum import SECONDS, Optimiser, Optimum
from autopar.solver.reduced_core import EXACT
from autopar.text.units import share_text

Point = tuple[float, float, Integers]  # seconds, bytes, choice

_STEPS = 40  # multipliers that are tried at most
_CLOSE = 20  # a gap this many times smaller than what is asked for ends the trying
_MOST_ENTRIES = 400_000  # of what is given to CP-SAT
_CLOSE_CORE = 2  # the same where elimination leaves a core
_PART = 0.1  # of the seconds without a limit, for all bytes of one
_FINER = 10  # the part of what is asked for that one multiplier may leave
_SPLICES = 6  # rounds of putting stretches of other choices into the best
_CUTS = 400  # places to cut that are looked at in pairs
_SLACK = 1e-9  # relative, for sums of floating-point numbers


class NoRoom(InvalidInput):
    """No choice fits into memory."""


class LagrangianSearch:
    """The search under one limit. `choice` and `bound` stand at any time, also if interrupted."""

    def __init__(
        self,
        packed: PackedGraph,
        limit: float,
        optimiser: Optimiser | None = None,
        tolerance: float = 0.01,
        report: Callable[[str], None] = lambda detail: None,
        deadline: float = math.inf,
        patience: float = 0.0,
    ) -> None:
        self.packed, self.limit, self.tolerance, self.report = packed, limit, tolerance, report
        self.deadline = deadline  # of this process; one choice is looked for in any case
        self.patience = patience  # seconds after it, before it is said that nothing fits
        self.optimiser = optimiser or Optimiser(packed)
        self.choice: Integers | None = None  # that fits; in the packed graph's numbers
        self.value = self.memory = np.inf  # of `choice`
        self.bound = -np.inf  # nothing that fits is below it
        self.multiplier = 0.0  # seconds that one more byte would save
        self.ends: tuple[Point, Point] | None = None  # the last that was too large, that fitted
        self._pool: list[Integers] = []  # choices that were best under some multiplier

    @property
    def gap(self) -> float:
        """How much cheaper than `choice` something that fits may be, as a part of its value."""
        return relative_gap(self.value, self.bound)

    def relax(self, cutoff: float = np.inf, multiplier: float = 0.0) -> bool:
        """The bound by the best multiplier, and choices close to it; whether a gap may be left.
        Tries `multiplier` first, and stops with a bound of `cutoff`."""
        large = small = None
        if multiplier:
            lowest = self._lowest(multiplier)
            self.bound, self.multiplier = lowest.bound - multiplier * self.limit, multiplier
            if self.bound >= cutoff:
                return False
            point = self.offer(lowest.choice)
            large, small = (None, point) if self.fits(point[1]) else (point, None)
        if large is None:
            # With a limit others follow, whose bounds are better; without one this is the answer.
            exact = {"deadline": self.deadline}
            is_last = np.isinf(self.limit)
            free = self.optimiser.minimise(**exact) if is_last else self._lowest(0.0)
            large, self.bound = self.offer(free.choice), max(self.bound, free.bound)
            if self.fits(large[1]):
                if not is_last and relative_gap(free.value, free.bound) > EXACT:
                    free = self.optimiser.minimise(**exact)
                    self.offer(free.choice)
                self.bound = max(self.bound, free.bound)
                return False  # what gap there is, elimination left
        if small is None and large[0] > 0 and self.limit > 0:
            point = self._guessed(large)
            large, small = (large, point) if self.fits(point[1]) else (point, None)
        if small is None:
            small = self.smallest()
        self.ends = self._squeeze(large, small, cutoff)
        if self.bound >= cutoff:
            return False
        if not self.optimiser.core or self.gap > self._enough:
            self._between(list(self._pool))
        if self.gap > self.tolerance:
            self._polish()
        return True

    def _guessed(self, large: Point) -> Point:
        """What is best where all memory there is costs a part of what `large` takes: what is best
        where nothing else counts takes far longer, and says less of what is between."""
        multiplier = 2.0 ** round(math.log2(_PART * large[0] / self.limit))  # of all limits near
        return self._tried(multiplier)[1]

    def _tried(self, multiplier: float) -> tuple[Optimum, Point]:
        """What is best under a multiplier; its bound and its choice are kept if they are better."""
        lowest = self._lowest(multiplier)
        bound = lowest.bound - multiplier * self.limit
        if bound > self.bound:
            self.bound, self.multiplier = bound, multiplier
        return lowest, self.offer(lowest.choice)

    @property
    def _enough(self) -> float:
        """The gap that ends the trying: where each multiplier takes long, sooner."""
        return self.tolerance / (_CLOSE_CORE if self.optimiser.core else _CLOSE)

    def is_late(self) -> bool:
        return time.process_time() > self.deadline

    def fits(self, memory: float) -> bool:
        return memory <= self.limit + _SLACK * abs(self.limit)

    def offer(self, choice: Integers) -> Point:
        """Keep `choice` if it fits and is the best so far."""
        cost, memory = self.packed.evaluate(choice)
        self._pool.append(choice)
        if self.fits(memory) and (cost < self.value or self.choice is None):
            self.choice, self.value, self.memory = choice, cost, memory
        return cost, memory, choice

    def smallest(self) -> Point:
        """The choice with the least memory; an error if even that does not fit."""
        least = self._lowest(np.inf)
        small = self.offer(least.choice)
        if not self.fits(small[1]) and relative_gap(least.value, least.bound) > EXACT:
            deadline = max(self.deadline, time.process_time() + self.patience)
            least = self.optimiser.minimise(np.inf, deadline=deadline)
            small = self.offer(least.choice)
        if not self.fits(least.bound) or not self.fits(small[1]):
            raise NoRoom(
                "the memory limit must leave room for the smallest choice of strategies",
                got=f"a limit of {self.limit:,.0f} bytes; the least "
                f"{'possible' if least.bound >= small[1] else 'that was found in time'} is "
                f"{small[1]:,.0f} bytes",
                remedy="allow more memory, cut over more devices, recompute activations, or use "
                "smaller micro-batches",
            )
        return small

    def _lowest(self, multiplier: float) -> Optimum:
        """What weighs least under a multiplier, as exactly as the search asks, in half of the time
        that is left: others may follow."""
        tolerance, now = max(EXACT, self.tolerance / _FINER), time.process_time()
        deadline = now + max(0.0, self.deadline - now) / 2
        return self.optimiser.minimise(multiplier, tolerance, deadline)

    def _squeeze(self, large: Point, small: Point, cutoff: float) -> tuple[Point, Point]:
        """Move the multiplier to where a choice too large and one that fits weigh the same."""
        for _ in range(_STEPS):
            if self.bound >= cutoff or self.gap <= self._enough or self.is_late():
                break
            if small[0] <= large[0]:
                self.bound = max(self.bound, large[0])
                break
            multiplier = (small[0] - large[0]) / (large[1] - small[1])
            line = large[0] + multiplier * large[1]
            lowest, point = self._tried(multiplier)
            self.report(f"within {share_text(self.gap)} of the best")
            is_known = any(point[1] == end[1] and point[0] >= end[0] for end in (large, small))
            if lowest.value >= line - _SLACK * abs(line) or is_known:
                break
            if self.optimiser.core and self.choice is not None:
                self._between([large[2], small[2], point[2]])
            if self.fits(point[1]):
                small = point
            else:
                large = point
        return large, small

    def _between(self, pool: Sequence[Integers]) -> None:
        """Put a stretch of one choice into another, as long as that is better and fits.

        A cut where one choice ends and the other begins is priced for all places at once; a
        stretch has two cuts, whose prices add (but for edges over both: the sum is checked)."""
        for _ in range(_SPLICES):
            before = self.value
            base = self.choice
            assert base is not None
            for other in pool:
                self._splice(base, other)
            if self.value >= before or self.gap <= self.tolerance / 10:
                break

    def _splice(self, base: Integers, other: Integers) -> None:
        packed = self.packed
        starts, ends = self._cuts(base, other), self._cuts(other, base)
        whole = np.array(packed.evaluate(other))
        i, j = (_best_cuts(cuts @ (1.0, self.multiplier)) for cuts in (starts, ends))
        totals = starts[i][:, None] + ends[j][None] - whole
        cost, memory = totals[..., 0], totals[..., 1]
        fits = (memory <= self.limit) & (i[:, None] <= j[None])
        if not fits.any():
            return
        cost = np.where(fits, cost, np.inf)
        first, last = np.unravel_index(int(np.argmin(cost)), cost.shape)
        if cost[first, last] < self.value:
            spliced = base.copy()
            spliced[i[first] : j[last]] = other[i[first] : j[last]]
            self.offer(spliced)

    def _cuts(self, head: Integers, tail: Integers) -> Array:
        """(seconds, bytes) of the first i nodes of one choice and the rest of another, all i."""
        packed = self.packed
        nodes = [packed.terms(choice) for choice in (head, tail)]
        edges = [packed.terms(*pair) for pair in ((head, head), (head, tail), (tail, tail))]
        impossible = np.isinf(edges[1][0])
        edges[1] = np.where(impossible, 0.0, edges[1][0]), edges[1][1]
        totals = np.empty((len(packed) + 1, 2))
        for kind in (0, 1):
            change = np.zeros(len(packed) + 1)
            change[0] = nodes[1][kind].sum() + edges[2][kind].sum()
            change[1:] += nodes[0][kind] - nodes[1][kind]
            np.add.at(change, packed.low + 1, edges[1][kind] - edges[2][kind])
            np.add.at(change, packed.high + 1, edges[0][kind] - edges[1][kind])
            totals[:, kind] = np.cumsum(change)
        # An edge that cannot be forbids every cut between its ends.
        cut = np.zeros(len(packed) + 1, np.int64)
        np.add.at(cut, packed.low[impossible] + 1, 1)
        np.add.at(cut, packed.high[impossible] + 1, -1)
        totals[np.cumsum(cut) > 0, 0] = np.inf
        return totals

    def _polish(self, rounds: int = 2) -> None:
        """Node by node, the cheapest strategy that still fits beside all others as they are."""
        assert self.choice is not None
        packed, choice = self.packed, self.choice.copy()
        free = self.limit - self.memory
        for _ in range(rounds):
            changed = False
            for node in range(len(packed)):
                own = packed.node_tables[packed.node_table[node]]
                cost, memory = own.cost, np.zeros(1) if own.memory is None else own.memory
                for other, table in packed.around[node]:
                    cost = cost + table.cost[:, choice[other]]
                    if table.memory is not None:
                        memory = memory + table.memory[:, choice[other]]
                memory = np.broadcast_to(memory, cost.shape)
                now = choice[node]
                allowed = memory - memory[now] <= max(free, 0.0)
                best = int(np.argmin(np.where(allowed, cost, np.inf)))
                if cost[best] < cost[now]:
                    free -= memory[best] - memory[now]
                    choice[node] = best
                    changed = True
            if not changed:
                break
        self.offer(choice)

    def by_constraints(self) -> None:
        """CP-SAT on the whole graph, after those nodes left that know no memory."""
        packed, choice = self.packed, self.choice
        assert choice is not None
        if packed.strategy_pairs > _MOST_ENTRIES:
            return
        self.report(f"within {share_text(self.gap)} of the best, the rest at once")
        memory: dict[tuple[int, ...], Array] = {}
        elimination = Elimination(dict(enumerate(packed.sizes.tolist())), limit=0)
        for scope, table in packed.tables_by_scope():
            elimination.add(scope, table.cost)
            if table.memory is not None:
                memory[scope] = table.memory
        elimination.run(keep={v for scope in memory for v in scope})
        core = elimination.core
        answer = solve_residual(
            {v: int(packed.sizes[v]) for v in core},
            elimination.factors,
            memory=memory,
            limit=self.limit,
            hint={v: int(choice[v]) for v in core},
            tolerance=self.tolerance / 2,
            seconds=min(SECONDS, max(0.1, self.deadline - time.process_time())),
        )
        self.bound = max(self.bound, answer.bound + elimination.constant)
        if answer.choice is not None:
            done = elimination.complete(dict(answer.choice))
            self.offer(np.array([done[v] for v in range(len(packed))], np.int64))


def _best_cuts(weights: Array) -> Integers:
    """The cheapest place to cut in each of some equal stretches."""
    width = -(-len(weights) // _CUTS)
    padded = np.append(weights, np.full(-len(weights) % width, np.inf)).reshape(-1, width)
    return padded.argmin(axis=1) + width * np.arange(len(padded))
