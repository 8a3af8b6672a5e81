"""Divide a graph under a memory limit by the strategies of one node, best bound first.

The bound lies between two choices. The graph is divided by a node on which they differ, the one
most strongly tied to its neighbours: with its strategy fixed, mixing the two choices costs more.
Strategies whose bound is no better than the best choice found are never looked at.
"""

from __future__ import annotations

import heapq

import numpy as np

from autopar.errors import InvalidInput
from autopar.solver.dominated import restricted
from autopar.solver.elimination import Elimination
from autopar.solver.gap_closing import CLOSED, close_gap
from autopar.solver.lagrangian import LagrangianSearch
from autopar.solver.optimum import Optimiser
from autopar.solver.packed_graph import Array, Integers, PackedGraph
from autopar.text.units import share_text

_SLACK = 1e-12  # relative
_PARTS = 300  # of the graph that are bounded, at most
_WORK = 30_000_000  # entries of all of them together, but a tenth of the parts is always allowed
_FOLD_FROM = 200  # nodes: smaller graphs are quicker without
_MOST_ENTRIES = 200_000  # of a graph in which every strategy of every node gets a bound


def branch_and_bound(
    search: LagrangianSearch, cutoff: float = np.inf, multiplier: float = 0.0
) -> None:
    """Search until the gap is closed, the work is used up, or the bound reaches `cutoff`.
    Beyond `cutoff` the choice is any that fits. `multiplier` is a guess at the final one."""
    if not search.relax(cutoff, multiplier):
        if search.choice is None:
            search.smallest()
        return
    close_gap(search, min(CLOSED, search.tolerance))
    if search.gap > search.tolerance:
        search.report(f"within {share_text(search.gap)} of the best")
        if Branching(search).run() == "tangled":
            search.by_constraints()


class Branching:
    """Improve the best choice and the bound of `root` until its gap is closed or time is up."""

    def __init__(self, root: LagrangianSearch) -> None:
        self.root = root
        self.open: list[tuple[float, int, PackedGraph, tuple[int, int], float]] = []
        self.count = self.looked = 0
        # A number of parts, not of seconds: the same graph has the same answer on every machine.
        self.most = max(_PARTS // 10, min(_PARTS, _WORK // (root.packed.strategy_pairs + 1)))

    @property
    def goal(self) -> float:
        """Return the cost below which a choice is better than the best by the tolerance."""
        best = self.root.value
        return best - max(self.root.tolerance, _SLACK) * abs(best)

    def run(self) -> str:
        """Divide until done; return "closed", "late", or "tangled" if elimination leaves a core."""
        root = self.root
        if not self._divide(root, root.packed):
            return "tangled"
        while self.open and self.open[0][0] < self.goal:
            root.bound = max(root.bound, min(self.open[0][0], root.value))
            if self.looked >= self.most or root.is_late():
                return "late"
            self.looked += 1
            entry = heapq.heappop(self.open)
            self._look_into(_fixed(entry[2], *entry[3]), entry[4])
            if root.is_late():  # what it says of the part may be for want of time
                heapq.heappush(self.open, entry)
        root.bound = max(root.bound, min(self.goal, root.value))
        return "closed"

    def _look_into(self, packed: PackedGraph, multiplier: float) -> None:
        """Bound one part; divide it further if it may hold something better."""
        root = self.root
        optimiser = Optimiser(packed, fold=len(packed) > _FOLD_FROM, limit=root.optimiser.limit)
        part = LagrangianSearch(
            packed, root.limit, optimiser, root.tolerance, deadline=root.deadline
        )
        try:
            gap_left = part.relax(cutoff=self.goal, multiplier=multiplier)
        except InvalidInput:  # nothing in this part fits
            return
        if part.choice is not None:
            previous_value = root.value
            root.offer(packed.translated(part.choice, root.packed))
            if root.value < previous_value:
                root.report(f"within {share_text(root.gap)} of the best")
        if gap_left and part.bound < self.goal:
            self._divide(part, packed)

    def _divide(self, part: LagrangianSearch, packed: PackedGraph) -> bool:
        """Queue the parts that may hold something better; return False if it is too tangled."""
        all_strategies = [np.arange(size) for size in packed.sizes.tolist()]
        bounds, strategies = None, all_strategies
        if packed.strategy_pairs <= _MOST_ENTRIES:
            bounds = self._bounds(part, packed)
            if bounds is None:
                return False
            strategies = [np.flatnonzero(bound < self.goal) for bound in bounds]
            if not all(len(keep) for keep in strategies):
                return True  # nothing better in here
        node = self._node(part, packed, strategies)
        if node is None:
            return True
        if bounds is not None:
            packed = restricted(packed, np.arange(len(packed)), strategies)
        for place, strategy in enumerate(strategies[node].tolist()):
            bound = part.bound
            if bounds is not None:
                bound = max(bound, float(bounds[node][strategy]))
            self.count += 1
            entry = (bound, self.count, packed, (node, place), part.multiplier)
            heapq.heappush(self.open, entry)
        return True

    def _bounds(self, part: LagrangianSearch, packed: PackedGraph) -> list[Array] | None:
        """Return the least weight with each strategy of each node; `None` if a core is left."""
        multiplier = part.multiplier
        elimination = Elimination(dict(enumerate(packed.sizes.tolist())), self.root.optimiser.limit)
        for scope, weights in packed.weights(multiplier):
            elimination.add(scope, weights)
        elimination.run()
        if elimination.core:
            return None
        marginals = elimination.marginals()
        return [marginals[v] - multiplier * self.root.limit for v in range(len(packed))]

    def _node(
        self, part: LagrangianSearch, packed: PackedGraph, strategies: list[Integers]
    ) -> int | None:
        """Return the node to divide by; `None` if each has one strategy."""
        divisible = np.array([len(keep) > 1 for keep in strategies])
        if not divisible.any():
            return None
        assert part.ends is not None
        large, small = part.ends[0][2], part.ends[1][2]
        with np.errstate(invalid="ignore"):
            penalty = packed.terms(large, small)[0] - packed.terms(large, large)[0]
            penalty += packed.terms(small, large)[0] - packed.terms(small, small)[0]
        penalty = np.nan_to_num(penalty, posinf=1e30, neginf=0.0)
        tie_strength = np.bincount(packed.low, penalty, len(packed))
        tie_strength += np.bincount(packed.high, penalty, len(packed))
        differs = (large != small) & divisible
        candidates = differs if differs.any() else divisible
        return int(np.argmax(np.where(candidates, tie_strength, -np.inf)))


def _fixed(packed: PackedGraph, node: int, strategy: int) -> PackedGraph:
    """Return the graph with one node's strategy given."""
    tables = packed.node_table.copy()
    tables[node] = len(packed.node_tables)
    all_ = [np.arange(len(table.cost)) for table in packed.node_tables]
    _, tables = np.unique(tables, return_inverse=True)
    others = np.unique(packed.node_table[np.arange(len(packed)) != node])
    strategies = [*(all_[table] for table in others), np.array([strategy])]
    return restricted(packed, tables, strategies)
