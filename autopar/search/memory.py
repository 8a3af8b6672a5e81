"""The least cost under a memory limit: a multiplier on memory, with a certified bound.

>>> graph = CostGraph()
>>> nodes = [graph.add_node([1.0, 2.0], memory=[8, 4]) for _ in range(100)]
>>> for a, b in zip(nodes, nodes[1:]):
...     graph.add_edge(a, b, [[0.0, 0.1], [0.1, 0.0]])
>>> found = Limited(graph.packed, limit=600).run()
>>> round(found.value, 3), found.memory, found.gap <= 0.01
(150.1, 600.0, True)

For every multiplier, the least of cost + multiplier · (memory - limit) is a bound. The multiplier
that gives the best bound is found where two choices, one too large and one that fits, weigh the
same; between these two lie others, made of the first nodes of one and the last nodes of the other.
If the gap is not closed by them, strategies that the bound rules out are dropped and CP-SAT
solves the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.errors import InvalidInput
from autopar.search.eliminate import Elimination
from autopar.search.graph import Array, CostGraph, Integers, Packed
from autopar.search.optimum import Optimiser
from autopar.search.prune import restricted
from autopar.search.residual import relative_gap, solve_residual

__all__ = ["CostGraph", "Found", "Limited"]

_STEPS = 40  # multipliers that are tried at most
_MOST_ENTRIES = 400_000  # of what is given to CP-SAT
_SPLICES = 6  # rounds of putting stretches of other choices into the best
_CUTS = 400  # places to cut that are looked at in pairs
_SLACK = 1e-9  # relative, for sums of floating-point numbers


@dataclass(frozen=True)
class Found:
    """A choice that fits, in the packed graph's numbers; nothing that fits is below `bound`."""

    choice: Integers
    value: float
    memory: float
    bound: float
    multiplier: float  # seconds that one more byte would save

    @property
    def gap(self) -> float:
        return relative_gap(self.value, self.bound)


class Limited:
    """The search under one limit. `best` and `bound` stand at any time, also if interrupted."""

    def __init__(
        self,
        packed: Packed,
        limit: float,
        *,
        optimiser: Optimiser | None = None,
        tolerance: float = 0.01,
        seconds: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.packed, self.limit, self.tolerance, self.seconds = packed, limit, tolerance, seconds
        self.optimiser = optimiser or Optimiser(packed)
        self.report = progress or (lambda detail: None)
        self.choice: Integers | None = None
        self.value = self.memory = np.inf
        self.bound = -np.inf
        self.multiplier = 0.0
        self._pool: list[Integers] = []  # choices that were best under some multiplier

    def run(self) -> Found:
        """Search until the gap is closed, as far as that goes in time."""
        free = self.optimiser.minimise()
        large, self.bound = self._offer(free.choice), free.bound
        if self._fits(large[1]):
            return self.found()
        small = self._least()
        large, small = self._squeeze(large, small)
        self._between()
        if self._gap() > self.tolerance:
            self._polish()
        if self._gap() > self.tolerance:
            self.report(f"gap {self._gap():.2%}: ruling strategies out")
            self._close()
        return self.found()

    def found(self) -> Found:
        """The best so far."""
        assert self.choice is not None
        bound = min(self.bound, self.value)
        return Found(self.choice, self.value, self.memory, bound, self.multiplier)

    def _fits(self, memory: float) -> bool:
        return memory <= self.limit + _SLACK * abs(self.limit)

    def _gap(self) -> float:
        return relative_gap(self.value, self.bound)

    def _offer(self, choice: Integers) -> tuple[float, float, Integers]:
        """Keep `choice` if it fits and is the best so far."""
        cost, memory = self.packed.evaluate(choice)
        self._pool.append(choice)
        if self._fits(memory) and (cost < self.value or self.choice is None):
            self.choice, self.value, self.memory = choice, cost, memory
        return cost, memory, choice

    def _least(self) -> tuple[float, float, Integers]:
        """The choice with the least memory; an error if even that does not fit."""
        least = self.optimiser.minimise(np.inf)
        small = self._offer(least.choice)
        if not self._fits(least.bound) or not self._fits(small[1]):
            raise InvalidInput(
                "the memory limit must leave room for the smallest choice of strategies",
                got=f"a limit of {self.limit:,.0f} bytes; the least possible is "
                f"{small[1]:,.0f} bytes",
                remedy="allow more memory, cut over more devices, recompute activations, or use "
                "smaller micro-batches",
            )
        return small

    def _squeeze(
        self, large: tuple[float, float, Integers], small: tuple[float, float, Integers]
    ) -> tuple[tuple[float, float, Integers], tuple[float, float, Integers]]:
        """Move the multiplier to where a choice too large and one that fits weigh the same."""
        for step in range(_STEPS):
            if small[0] <= large[0]:
                self.bound = max(self.bound, large[0])
                break
            multiplier = (small[0] - large[0]) / (large[1] - small[1])
            line = large[0] + multiplier * large[1]
            lowest = self.optimiser.minimise(multiplier)
            bound = lowest.bound - multiplier * self.limit
            if bound > self.bound:
                self.bound, self.multiplier = bound, multiplier
            point = self._offer(lowest.choice)
            self.report(f"multiplier {step + 1}: gap {self._gap():.2%}")
            if lowest.value >= line - _SLACK * abs(line) or point[1] in (large[1], small[1]):
                break
            if self._fits(point[1]):
                small = point
            else:
                large = point
        return large, small

    def _between(self) -> None:
        """Put a stretch of one choice into another, as long as that is better and fits.

        A cut where one choice ends and the other begins is priced for all places at once; a
        stretch has two cuts, whose prices add (but for edges over both: the sum is checked)."""
        pool = list(self._pool)
        for _ in range(_SPLICES):
            before = self.value
            base = self.choice
            assert base is not None
            for other in pool:
                self._splice(base, other)
            if self.value >= before or self._gap() <= self.tolerance / 10:
                break

    def _splice(self, base: Integers, other: Integers) -> None:
        packed = self.packed
        starts, ends = self._cuts(base, other), self._cuts(other, base)
        whole = np.array(packed.evaluate(other))
        if not (np.isfinite(starts).all() and np.isfinite(ends).all()):
            return
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
            self._offer(spliced)

    def _cuts(self, head: Integers, tail: Integers) -> Array:
        """(seconds, bytes) of the first i nodes of one choice and the rest of another, all i."""
        packed = self.packed
        nodes = [packed.terms(choice) for choice in (head, tail)]
        edges = [packed.terms(*pair) for pair in ((head, head), (head, tail), (tail, tail))]
        totals = np.empty((len(packed) + 1, 2))
        for kind in (0, 1):
            change = np.zeros(len(packed) + 1)
            change[0] = nodes[1][kind].sum() + edges[2][kind].sum()
            change[1:] += nodes[0][kind] - nodes[1][kind]
            with np.errstate(invalid="ignore"):  # infinity less infinity is not used
                np.add.at(change, packed.low + 1, edges[1][kind] - edges[2][kind])
                np.add.at(change, packed.high + 1, edges[0][kind] - edges[1][kind])
            totals[:, kind] = np.cumsum(change)
        return totals

    def _polish(self, rounds: int = 2) -> None:
        """Node by node, the cheapest strategy that still fits beside all others as they are."""
        assert self.choice is not None
        packed, choice = self.packed, self.choice.copy()
        around: list[list[tuple[int, bool, int]]] = [[] for _ in range(len(packed))]
        for low, high, table in zip(
            packed.low.tolist(), packed.high.tolist(), packed.edge_table.tolist()
        ):
            around[low].append((high, True, table))
            around[high].append((low, False, table))
        free = self.limit - self.memory
        for _ in range(rounds):
            changed = False
            for node in range(len(packed)):
                own = packed.node_tables[packed.node_table[node]]
                cost, memory = own.cost, np.zeros(1) if own.memory is None else own.memory
                for other, is_low, number in around[node]:
                    table, at = packed.edge_tables[number], choice[other]
                    cost = cost + (table.cost[:, at] if is_low else table.cost[at])
                    if table.memory is not None:
                        memory = memory + (table.memory[:, at] if is_low else table.memory[at])
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
        self._offer(choice)

    def _close(self) -> None:
        """Drop what cannot be in a choice better than the best by more than the tolerance, and
        solve the rest as a whole."""
        assert self.choice is not None
        goal = self.value - self.tolerance * abs(self.value)
        smaller = self._possible(goal)
        if smaller is None:
            self.bound = max(self.bound, goal)
            return
        if smaller.strategy_pairs > _MOST_ENTRIES:
            return
        numbers = [{int(s): i for i, s in enumerate(strategies)} for strategies in smaller.strategy]
        ours = [self.packed.strategy[t][s] for t, s in zip(self.packed.node_table, self.choice)]
        places = [numbers[t].get(int(s)) for t, s in zip(smaller.node_table, ours)]
        hint = {v: s for v, s in enumerate(places) if s is not None}
        self.report(f"{smaller.strategy_pairs:,} pairs of strategies to CP-SAT")
        choice, bound = self._by_constraints(smaller, hint)
        # Whatever was dropped is at least as dear as the goal.
        self.bound = max(self.bound, min(bound, goal if smaller is not self.packed else bound))
        if choice is not None:
            back = [
                {int(s): i for i, s in enumerate(strategies)} for strategies in self.packed.strategy
            ]
            chosen = [smaller.strategy[t][s] for t, s in zip(smaller.node_table, choice)]
            self._offer(np.array([back[t][int(s)] for t, s in zip(self.packed.node_table, chosen)]))

    def _possible(self, goal: float) -> Packed | None:
        """The graph with the strategies that a choice cheaper than `goal` may have."""
        packed, multiplier = self.packed, self.multiplier
        elimination = Elimination(dict(enumerate(packed.sizes.tolist())))
        for node, table in enumerate(packed.node_table.tolist()):
            elimination.add((node,), packed.node_tables[table].weighted(multiplier))
        edges = [table.weighted(multiplier) for table in packed.edge_tables]
        for low, high, number in zip(
            packed.low.tolist(), packed.high.tolist(), packed.edge_table.tolist()
        ):
            elimination.add((low, high), edges[number])
        elimination.run()
        if elimination.core:
            return packed
        marginals = elimination.marginals()
        most = goal + multiplier * self.limit
        most += _SLACK * abs(most)
        kept = [np.flatnonzero(marginals[node] <= most) for node in range(len(packed))]
        if not all(len(keep) for keep in kept):
            return None
        return restricted(packed, np.arange(len(packed)), kept)

    def _by_constraints(
        self, packed: Packed, hint: dict[int, int]
    ) -> tuple[Integers | None, float]:
        """CP-SAT on the whole graph, after those nodes left that know no memory."""
        memory: dict[tuple[int, ...], Array] = {}
        elimination = Elimination(dict(enumerate(packed.sizes.tolist())), limit=0)
        keep: set[int] = set()
        for node, number in enumerate(packed.node_table.tolist()):
            table = packed.node_tables[number]
            elimination.add((node,), table.cost)
            if table.memory is not None:
                memory[node,] = table.memory
                keep.add(node)
        for low, high, number in zip(
            packed.low.tolist(), packed.high.tolist(), packed.edge_table.tolist()
        ):
            table = packed.edge_tables[number]
            elimination.add((low, high), table.cost)
            if table.memory is not None:
                memory[low, high] = table.memory
                keep |= {low, high}
        elimination.run(keep=keep)
        core = elimination.core
        answer = solve_residual(
            {v: int(packed.sizes[v]) for v in core},
            elimination.factors,
            memory=memory,
            limit=self.limit,
            hint={v: hint[v] for v in core if v in hint},
            tolerance=self.tolerance / 2,
            seconds=self.seconds,
        )
        bound = answer.bound + elimination.constant
        if answer.choice is None:
            return None, bound
        done = elimination.complete(dict(answer.choice))
        return np.array([done[v] for v in range(len(packed))], np.int64), bound


def _best_cuts(weights: Array) -> Integers:
    """The cheapest place to cut in each of some equal stretches."""
    width = -(-len(weights) // _CUTS)
    padded = np.append(weights, np.full(-len(weights) % width, np.inf)).reshape(-1, width)
    return padded.argmin(axis=1) + width * np.arange(len(padded))
