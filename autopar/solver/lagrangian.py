"""Find the least cost under a memory limit by a multiplier on memory, with a certified bound.

>>> from autopar.solver.cost_graph import CostGraph
>>> graph = CostGraph()
>>> nodes = [graph.add_node([1.0, 2.0], memory=[8, 4]) for _ in range(100)]
>>> for a, b in zip(nodes, nodes[1:]):
...     graph.add_edge(a, b, [[0.0, 0.1], [0.1, 0.0]])
>>> search = LagrangianSearch(graph.packed, 600, Optimiser(graph.packed))
>>> search.relax(), round(search.value, 3), search.memory, search.gap <= 0.01
(True, 150.1, 600.0, True)

For every multiplier, the least of cost + multiplier · (memory - limit) is a bound. The multiplier
that gives the best bound is found where two choices, one too large and one that fits, weigh the
same. Others are made of the first nodes of one of these and the last nodes of the other.
If they do not close the gap, `branch_and_bound` divides the graph by the strategies of a node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
_CLOSE = 20  # a gap this many times smaller than the tolerance ends the trying
_MOST_ENTRIES = 400_000  # of what is given to CP-SAT
_CLOSE_CORE = 2  # like `_CLOSE`, where elimination leaves a core
_PART = 0.1  # of the seconds without a limit, for all bytes of one
_FINER = 10  # the part of what is asked for that one multiplier may leave
_SPLICES = 6  # rounds of putting stretches of other choices into the best
_CUTS = 400  # places to cut that are looked at in pairs
_SLACK = 1e-9  # relative, for sums of floating-point numbers


class NoRoom(InvalidInput):
    """Refuse a memory limit into which no choice fits."""


@dataclass(eq=False)
class LagrangianSearch:
    """Search under one limit; `choice` and `bound` are valid at any time, also if interrupted."""

    packed: PackedGraph
    limit: float
    optimiser: Optimiser
    tolerance: float = 0.01
    report: Callable[[str], None] = lambda detail: None
    deadline: float = math.inf  # in this process's seconds; one choice is searched in any case
    patience: float = 0.0  # seconds after the deadline, before the search says that nothing fits

    def __post_init__(self) -> None:
        self.choice: Integers | None = None  # that fits; in the packed graph's numbers
        self.value = self.memory = np.inf  # of `choice`
        self.bound = -np.inf  # nothing that fits is below it
        self.multiplier = 0.0  # seconds that one more byte would save
        self.ends: tuple[Point, Point] | None = None  # the last that was too large, that fitted
        self._pool: list[Integers] = []  # choices that were best under some multiplier

    @property
    def gap(self) -> float:
        """Return by which part of its value `choice` may exceed the best that fits."""
        return relative_gap(self.value, self.bound)

    def relax(self, cutoff: float = np.inf, multiplier: float = 0.0) -> bool:
        """Find the best multiplier's bound and choices near it; return if a gap may be left.
        Tries `multiplier` first, and stops with a bound of `cutoff`."""
        too_large = fitting = None
        if multiplier:
            lowest = self._lowest(multiplier)
            self.bound, self.multiplier = lowest.bound - multiplier * self.limit, multiplier
            if self.bound >= cutoff:
                return False
            point = self.offer(lowest.choice)
            too_large, fitting = (None, point) if self.fits(point[1]) else (point, None)
        if too_large is None:
            # With a limit others follow, whose bounds are better; without one this is the answer.
            until = {"deadline": self.deadline}
            is_last = np.isinf(self.limit)
            unlimited = self.optimiser.minimise(**until) if is_last else self._lowest(0.0)
            too_large, self.bound = self.offer(unlimited.choice), max(self.bound, unlimited.bound)
            if self.fits(too_large[1]):
                if not is_last and relative_gap(unlimited.value, unlimited.bound) > EXACT:
                    unlimited = self.optimiser.minimise(**until)
                    self.offer(unlimited.choice)
                self.bound = max(self.bound, unlimited.bound)
                return False  # what gap there is, elimination left
        if fitting is None and too_large[0] > 0 and self.limit > 0:
            point = self._guessed(too_large)
            too_large, fitting = (too_large, point) if self.fits(point[1]) else (point, None)
        if fitting is None:
            fitting = self.smallest()
        self.ends = self._squeeze(too_large, fitting, cutoff)
        if self.bound >= cutoff:
            return False
        if not self.optimiser.core or self.gap > self._enough:
            self._between(list(self._pool))
        if self.gap > self.tolerance:
            self._polish()
        return True

    def _guessed(self, too_large: Point) -> Point:
        """Return the best point if the limit's memory costs a part of what `too_large` takes.
        The point of least memory takes far longer, and says less of what lies between."""
        exponent = round(math.log2(_PART * too_large[0] / self.limit))
        return self._tried(2.0**exponent)[1]  # one multiplier for all limits near this one

    def _tried(self, multiplier: float) -> tuple[Optimum, Point]:
        """Return the best under a multiplier and its point; keep bound and choice if better."""
        lowest = self._lowest(multiplier)
        bound = lowest.bound - multiplier * self.limit
        if bound > self.bound:
            self.bound, self.multiplier = bound, multiplier
        return lowest, self.offer(lowest.choice)

    @property
    def _enough(self) -> float:
        """Return the gap that ends the trying: sooner where each multiplier takes long."""
        return self.tolerance / (_CLOSE_CORE if self.optimiser.core else _CLOSE)

    def is_late(self) -> bool:
        """Return whether the deadline has passed."""
        return time.process_time() > self.deadline

    def fits(self, memory: float) -> bool:
        """Return whether so many bytes are within the limit."""
        return memory <= self.limit + _SLACK * abs(self.limit)

    def offer(self, choice: Integers) -> Point:
        """Keep `choice` if it fits and is the best so far; return its point."""
        cost, memory = self.packed.evaluate(choice)
        self._pool.append(choice)
        if self.fits(memory) and (cost < self.value or self.choice is None):
            self.choice, self.value, self.memory = choice, cost, memory
        return cost, memory, choice

    def smallest(self) -> Point:
        """Return the choice with the least memory; raise `NoRoom` if even that does not fit."""
        least = self._lowest(np.inf)
        point = self.offer(least.choice)
        if not self.fits(point[1]) and relative_gap(least.value, least.bound) > EXACT:
            deadline = max(self.deadline, time.process_time() + self.patience)
            least = self.optimiser.minimise(np.inf, deadline=deadline)
            point = self.offer(least.choice)
        if not self.fits(least.bound) or not self.fits(point[1]):
            raise NoRoom(
                "the memory limit must leave room for the smallest choice of strategies",
                got=f"a limit of {self.limit:,.0f} bytes; the least "
                f"{'possible' if least.bound >= point[1] else 'that was found in time'} is "
                f"{point[1]:,.0f} bytes",
                remedy="allow more memory, cut over more devices, recompute activations, or use "
                "smaller micro-batches",
            )
        return point

    def _lowest(self, multiplier: float) -> Optimum:
        """Return the least weight under a multiplier, in half of the time that is left.
        Others may follow, so it is only a little more exact than the search asks."""
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

        A cut where one choice ends and the other begins is priced for all places at once; a stretch
        has two cuts, whose prices add (but for edges over both: the sum is checked)."""
        for _ in range(_SPLICES):
            before = self.value
            base = self.choice
            assert base is not None
            for other in pool:
                self._splice(base, other)
            if self.value >= before or self.gap <= self.tolerance / 10:
                break

    def _splice(self, base: Integers, other: Integers) -> None:
        """Put the best stretch of `other` into `base`, if that is better and fits."""
        packed = self.packed
        starts, ends = self._cuts(base, other), self._cuts(other, base)
        other_total = np.array(packed.evaluate(other))
        i, j = (_best_cuts(cuts @ (1.0, self.multiplier)) for cuts in (starts, ends))
        totals = starts[i][:, None] + ends[j][None] - other_total
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
        """Return (seconds, bytes) of the first i nodes of `head` and the rest of `tail`, all i."""
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
        """Give node after node the cheapest strategy that still fits beside all others."""
        assert self.choice is not None
        packed, choice = self.packed, self.choice.copy()
        free = self.limit - self.memory
        for _ in range(rounds):
            changed = False
            for node in range(len(packed)):
                node_table = packed.node_tables[packed.node_table[node]]
                cost = node_table.cost
                memory = np.zeros(1) if node_table.memory is None else node_table.memory
                for other, table in packed.around[node]:
                    cost = cost + table.cost[:, choice[other]]
                    if table.memory is not None:
                        memory = memory + table.memory[:, choice[other]]
                memory = np.broadcast_to(memory, cost.shape)
                current = choice[node]
                allowed = memory - memory[current] <= max(free, 0.0)
                best = int(np.argmin(np.where(allowed, cost, np.inf)))
                if cost[best] < cost[current]:
                    free -= memory[best] - memory[current]
                    choice[node] = best
                    changed = True
            if not changed:
                break
        self.offer(choice)

    def by_constraints(self) -> None:
        """Solve the whole graph by CP-SAT, after those nodes left that have no memory."""
        packed, choice = self.packed, self.choice
        assert choice is not None
        if packed.strategy_pairs > _MOST_ENTRIES:
            return
        self.report(f"within {share_text(self.gap)} of the best, the rest at once")
        memory_tables: dict[tuple[int, ...], Array] = {}
        elimination = Elimination(dict(enumerate(packed.sizes.tolist())), limit=0)
        for scope, table in packed.tables_by_scope():
            elimination.add(scope, table.cost)
            if table.memory is not None:
                memory_tables[scope] = table.memory
        elimination.run(keep={v for scope in memory_tables for v in scope})
        core = elimination.core
        residual = solve_residual(
            {v: int(packed.sizes[v]) for v in core},
            elimination.factors,
            memory=memory_tables,
            limit=self.limit,
            hint={v: int(choice[v]) for v in core},
            tolerance=self.tolerance / 2,
            seconds=min(SECONDS, max(0.1, self.deadline - time.process_time())),
        )
        self.bound = max(self.bound, residual.bound + elimination.constant)
        if residual.choice is not None:
            done = elimination.complete(dict(residual.choice))
            self.offer(np.array([done[v] for v in range(len(packed))], np.int64))


def _best_cuts(weights: Array) -> Integers:
    """Return the cheapest place to cut in each of some equal stretches."""
    width = -(-len(weights) // _CUTS)
    padded = np.append(weights, np.full(-len(weights) % width, np.inf)).reshape(-1, width)
    return padded.argmin(axis=1) + width * np.arange(len(padded))
