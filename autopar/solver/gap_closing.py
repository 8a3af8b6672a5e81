"""Close the gap that a multiplier leaves under a memory limit, from the near optima.

Whatever fits and costs less than the best choice so far has an excess below the gap: it is among
the near optima. They are listed for a small excess first. If none fits, the bound rises by as much.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.solver.elimination import Scope
from autopar.solver.lagrangian import LagrangianSearch
from autopar.solver.near_chains import NearChain, near_scope
from autopar.solver.near_optima import ROUNDED, ChoiceRows, Nearness, TooManyRows, near_optima
from autopar.solver.packed_graph import Array, Integers
from autopar.text.units import share_text

CLOSED = 8e-5  # relative: a gap that is worth no further look
_FIRST = 1 / 4  # of the gap, that is looked at first
_WIDER = 2.0  # times the excess, each time that it leaves the gap open
_COARSE = 1 / 4  # of the gap that is asked for, by which choices may stand for one another
_ROUNDS = 12
_LOST = 1_000_000 * ROUNDED  # of an excess, by what is not told apart in all steps


def close_gap(search: LagrangianSearch, tolerance: float = CLOSED) -> None:
    """Improve the choice and the bound of a search until its gap is closed, where elimination ends
    and the near optima are few."""
    if not np.isfinite(search.value) or search.optimiser.core or not search.multiplier > 0:
        return
    listing = _Listing(search, tolerance)
    most = _FIRST * (search.value - search.bound)
    for _ in range(_ROUNDS):
        if search.gap <= tolerance or search.is_late() or listing.elimination.core:
            break
        try:
            listing.look(max(most, tolerance * abs(search.value)))
        except TooManyRows:
            break
        search.report(f"within {share_text(search.gap)} of the best")
        most *= _WIDER


class _Listing:
    """List the near optima at the multiplier of a search."""

    def __init__(self, search: LagrangianSearch, tolerance: float) -> None:
        self.search, self.tolerance = search, tolerance
        self.multiplier = search.multiplier
        self.elimination, self.chains = search.optimiser.eliminated(self.multiplier)
        self.bound = self.elimination.constant - self.multiplier * search.limit

    def look(self, most: float) -> None:
        """Look at all choices of at most so much excess; keep the best that fits."""
        search, best = self.search, self.elimination.constant
        allowed = self.tolerance * abs(search.value)
        coarse = _COARSE * allowed / max(1, len(self.chains))
        # What costs hardly less than the best so far need not be found.
        enough = search.value - self.bound - (1 - 2 * _COARSE) * allowed
        near = Nearness(min(most, enough), self.multiplier)
        chains, ways = list[NearChain](), list[tuple[Scope, ChoiceRows]]()
        for reduced in self.chains:
            block = search.optimiser.block(reduced.chain, self.multiplier)
            chain = NearChain(reduced, block, near, best, coarse)
            scope, totals = near_scope(self.elimination, reduced.chain.scope, near.most)
            ways.append((reduced.chain.scope, chain.rows(scope, totals)))
            chains.append(chain)
        rows = near_optima(self.elimination, self._memory(), near, ways)
        cost = self.bound + rows.excess + self.multiplier * (search.limit - rows.memory)
        cost = np.where([search.fits(memory) for memory in rows.memory], cost, np.inf)
        row = int(np.argmin(np.append(cost, np.inf)))
        proven = self.bound + near.most
        if row < len(cost) and np.isfinite(cost[row]):
            values = dict(zip(rows.variables, rows.values[row].tolist()))
            choice: Integers = np.zeros(len(search.packed), np.int64)
            for v in search.optimiser.variables:
                choice[v] = values[v]
            for chain in chains:
                chain.complete(values[chain.variable], choice)
            search.offer(choice)
            proven = min(proven, float(cost[row]))
        lost = near.most * _LOST + sum(chain.lost for chain in chains)
        search.bound = max(search.bound, min(proven - lost, search.value))

    def _memory(self) -> Iterator[tuple[Scope, Array]]:
        """Yield the bytes of what is outside of chains, by the nodes that they depend on."""
        packed, optimiser = self.search.packed, self.search.optimiser
        for node in optimiser.outside:
            if (memory := packed.node_tables[packed.node_table[node]].memory) is not None:
                yield (node,), memory
        for low, high, table in optimiser.edges:
            if (memory := packed.edge_tables[table].memory) is not None:
                yield (low, high), memory
