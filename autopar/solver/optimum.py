"""Find the least cost + multiplier · memory of a whole graph: fold, eliminate, solve the rest.

>>> from autopar.solver.cost_graph import CostGraph
>>> graph = CostGraph()
>>> nodes = [graph.add_node([1.0, 2.0], memory=[4, 1]) for _ in range(100)]
>>> for a, b in zip(nodes, nodes[1:]):
...     graph.add_edge(a, b, [[0.0, 1.0], [1.0, 0.0]])
>>> optimiser = Optimiser(graph.packed)
>>> optimiser.minimise().value, optimiser.minimise(multiplier=1.0).value
(100.0, 300.0)

Repeated blocks and what crosses between them are found once; a call computes with new weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autopar.solver.chain import Chain, ReducedChain
from autopar.solver.cost_graph import Array, Integers, PackedGraph
from autopar.solver.cp_sat_residual import relative_gap
from autopar.solver.elimination import LIMIT, Elimination, EliminationStep
from autopar.solver.fold import find_runs
from autopar.solver.reduced_core import EXACT, ReducedCore

SECONDS = 10.0  # of a search, at most
MOST_WORK = 1 << 28  # entries of all joins of one elimination


@dataclass(frozen=True)
class Optimum:
    """Hold the least weight found, with its choice (in the packed graph's numbers) and bound."""

    value: float
    bound: float
    choice: Integers


class Optimiser:
    """Minimise exactly on one graph, repeatedly with other weights."""

    def __init__(self, packed: PackedGraph, *, fold: bool = True, limit: int = LIMIT) -> None:
        self.packed, self.limit = packed, limit
        runs = find_runs(packed) if fold else []
        self.core = 0  # the most nodes that elimination left, since whoever asks set it to 0
        self._is_tangled = False  # whether it leaves any
        self._last: ReducedCore | None = None
        # Of costs alone, not yet run.
        self._ready: tuple[Elimination, list[ReducedChain]] | None = None
        self._known: dict[float, tuple[Optimum, int]] = {}  # by multiplier, with the core's nodes
        self._place([Chain(packed, run, limit) for run in runs if Chain.worthwhile(packed, run)])

    def _place(self, chains: list[Chain]) -> None:
        """Find which nodes and edges stay outside of these chains."""
        packed = self.packed
        inside = np.zeros(len(packed), bool)
        for chain in chains:
            inside[chain.run.start : chain.run.end] = True
        outputs = {v for chain in chains for v in chain.run.outputs}
        self.chains = chains
        self.outside = np.flatnonzero(~inside).tolist()
        # An edge belongs to a chain if both ends do, or if its chain's table tells of it.
        in_chain = np.zeros(len(packed.low), bool)
        for chain in chains:
            run = chain.run
            low = (packed.low >= run.start) & (packed.low < run.end)
            high = (packed.high >= run.start) & (packed.high < run.end)
            in_chain |= high | (low & np.isin(packed.high, run.shared))
        self.edges = [packed.edges[e] for e in np.flatnonzero(~in_chain)]
        self.variables = {v: int(packed.sizes[v]) for v in (*self.outside, *sorted(outputs))}

    def minimise(
        self, multiplier: float = 0.0, tolerance: float = EXACT, deadline: float = math.inf
    ) -> Optimum:
        """Return the least of cost + multiplier · memory; of memory alone if the multiplier is inf.
        What elimination leaves has a gap of `tolerance`, or a larger one at the deadline."""
        if multiplier in self._known:
            cached, core = self._known[multiplier]
            if relative_gap(cached.value, cached.bound) <= max(tolerance, EXACT):
                self.core = max(self.core, core)
                return cached
        elimination, reduced = self.eliminated(multiplier)
        value = bound = elimination.constant
        choice: dict[int, int] = {}
        if elimination.core:
            is_memory = multiplier == np.inf
            residual = self._core(elimination, is_separate=is_memory).solve(tolerance, deadline)
            value, bound = value + residual.value, bound + residual.bound
            choice = dict(residual.choice or {})
        elimination.complete(choice)
        full_choice = np.zeros(len(self.packed), np.int64)
        for v, strategy in choice.items():
            full_choice[v] = strategy
        for entry in reduced:
            entry.chain.complete(entry, full_choice)
        optimum = Optimum(value, min(bound, value), full_choice)
        self._known[multiplier] = optimum, len(elimination.core)
        return optimum

    def least_with(self, node: int, multiplier: float = 0.0) -> Array:
        """Return the least weight with each strategy of `node`, which lies outside all chains."""
        elimination, _ = self.eliminated(multiplier, keep=(node,))
        if set(elimination.core) == {node}:
            return elimination.joint((node,))
        sizes = {v: self.variables[v] for v in elimination.core}
        node_cost = elimination.factors.get((node,), 0.0)
        least = np.full(sizes[node], elimination.constant)
        deadline = time.process_time()
        for strategy in range(len(least)):
            deadline += SECONDS / len(least)
            only_strategy = np.where(np.arange(len(least)) == strategy, node_cost, np.inf)
            elimination.factors[node,] = only_strategy
            least[strategy] += self._core(elimination).solve(deadline=deadline).bound
        return least

    def _core(self, elimination: Elimination, *, is_separate: bool = False) -> ReducedCore:
        """Return what elimination left, with the messages and the choice of the last time.
        `is_separate`: messages of other weights say nothing of these, nor these of others."""
        sizes = {v: self.variables[v] for v in elimination.core}
        self.core = max(self.core, len(sizes))
        last = self._last.sent if self._last is not None and not is_separate else {}
        sent = last if {*last} == {s for s in elimination.factors if len(s) == 2} else None
        factors, constant = elimination.factors, elimination.constant
        core = ReducedCore(sizes, factors, constant=constant, limit=self.limit, sent=sent)
        if sent is not None and self._last is not None:
            core.offer(self._last.messages.choice)
        self._last = self._last if is_separate else core
        return core

    def is_tangled(self) -> bool:
        """Return whether elimination alone leaves something, or takes long."""
        self._ready = self._elimination(0.0, self.limit)
        steps = self._ready[0].order()
        return len(steps) < len(self.variables) or _work(steps) > MOST_WORK

    def eliminated(
        self, multiplier: float, keep: tuple[int, ...] = ()
    ) -> tuple[Elimination, list[ReducedChain]]:
        """Return all weights after elimination.
        Where it would leave a core, or take too long, only those nodes leave that leave no table
        over more than a pair: the core is then solved as that."""
        if not self._is_tangled:
            ready, self._ready = self._ready, None
            if ready is None or multiplier:
                ready = self._elimination(multiplier, self.limit)
            elimination, reduced = ready
            steps = elimination.order(keep)
            is_complete = len(steps) + len(keep) == len(self.variables)
            if is_complete and _work(steps) <= MOST_WORK:
                elimination.run(keep)
                return elimination, reduced
            # What can leave follows from the sizes, and is the same whatever the multiplier.
            self._is_tangled = True
            self._place([chain for chain in self.chains if len(chain.scope) <= 2])
        elimination, reduced = self._elimination(multiplier, 0)
        elimination.run(keep)
        return elimination, reduced

    def block(self, chain: Chain, multiplier: float) -> Elimination:
        """Return the weights of a chain's block as tables, nothing eliminated yet."""
        packed = self.packed
        nodes = [table.weighted(multiplier) for table in packed.node_tables]
        edges = [table.weighted(multiplier) for table in packed.edge_tables]
        return chain.block(nodes, edges)

    def _elimination(self, multiplier: float, limit: int) -> tuple[Elimination, list[ReducedChain]]:
        """Return all weights as tables, chains reduced to theirs, nothing eliminated yet."""
        packed = self.packed
        nodes = [table.weighted(multiplier) for table in packed.node_tables]
        edges = [table.weighted(multiplier) for table in packed.edge_tables]
        attempts = [chain.reduce(nodes, edges) for chain in self.chains]
        reduced = [entry for entry in attempts if entry is not None]
        if len(reduced) < len(attempts):
            self._place([entry.chain for entry in reduced])
        elimination = Elimination(self.variables, limit)
        for node in self.outside:
            elimination.add((node,), nodes[packed.node_table[node]])
        for low, high, table in self.edges:
            elimination.add((low, high), edges[table])
        for entry in reduced:
            elimination.add(entry.chain.scope, entry.power.table)
        return elimination, reduced


def _work(steps: list[EliminationStep]) -> int:
    return sum(step.entries for step in steps)
