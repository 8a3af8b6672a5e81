"""Solve what elimination leaves: a bound by messages, then elimination of the strategies in doubt.

>>> rng = np.random.default_rng(0)
>>> pairs = {(a, b): rng.random((4, 4)) for b in range(12) for a in range(b)}
>>> core = ReducedCore(dict.fromkeys(range(12), 4), pairs)
>>> answer = core.solve()
>>> answer.gap < 1e-9
True

Messages give every strategy an excess: the least that a choice with it costs above the bound that
they prove by themselves. A strategy whose excess cannot lead to a better choice is dropped.
Elimination among strategies of small excess gives a good choice; any other costs that much more.
Moves on forests improve the best choice in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from autopar.solver.cp_sat_residual import Factors, Residual, solve_residual
from autopar.solver.elimination import LIMIT, Elimination, elimination_order
from autopar.solver.message_passing import MessagePassing, Sent
from autopar.solver.packed_graph import Array, Integers

EXACT = 1e-10  # relative: what sums of floating-point numbers are not asked to tell apart
_MOST_WORK = 1 << 25  # entries of all joins of one elimination
SECONDS = 3.0  # of CP-SAT, at most
_MOST_ENTRIES = 50_000  # of what is given to CP-SAT
_ROUNDS = (10, 20, 30, 40, 40)  # of messages, before strategies are dropped each time
_MOVES = 12  # of a choice that is not good enough, after messages
_PROGRESS = 0.9  # of a gap that need not be closed: what little more is won is not waited for
_HALVINGS = 6  # of how many strategies elimination can do with


class ReducedCore:
    """Solve one graph of tables over nodes and pairs of them, with the best choice and bound."""

    def __init__(
        self,
        sizes: Mapping[int, int],
        factors: Factors,
        *,
        constant: float = 0.0,
        limit: int = LIMIT,
        sent: Sent | None = None,
    ) -> None:
        self.sizes, self.factors, self.constant, self.limit = sizes, factors, constant, limit
        nodes, edges = _finite(sizes, factors)
        self.messages = MessagePassing(nodes, edges, sent)
        self.sent = self.messages.sent  # as they are while no strategy is dropped

    def offer(self, choice: Mapping[int, int]) -> None:
        """Begin with a choice, as that which was the best under other weights."""
        value = self._value(choice)
        if np.isfinite(value):
            self.messages.offer(choice, value)

    def solve(self, tolerance: float = EXACT, deadline: float = math.inf) -> Residual:
        """Return the least sum of all tables, as near to its bound as asked and as time allows."""
        messages = self.messages
        for rounds in _ROUNDS:
            before = messages.gap
            messages.run(rounds, self._goal(tolerance), deadline)
            if rounds == _ROUNDS[0]:
                self.sent = messages.sent
            if self._is_open(tolerance, deadline):
                messages.improve(_MOVES)
            if not self._is_open(tolerance, deadline):
                break
            self._narrow()
            self._eliminate()
            target = 1.0 if tolerance <= EXACT else _PROGRESS
            if not self._is_open(tolerance, deadline) or messages.gap >= target * before:
                break
        if tolerance <= EXACT and self._is_open(tolerance, deadline):
            self._by_constraints(deadline)
        return self._answer()

    def _goal(self, tolerance: float) -> float:
        """Return the gap that is asked for, in the unit of the costs."""
        value = self.messages.value
        return tolerance * abs(value + self.constant) if np.isfinite(value) else 0.0

    def _is_open(self, tolerance: float, deadline: float) -> bool:
        return self.messages.gap > self._goal(tolerance) and time.process_time() < deadline

    def _answer(self) -> Residual:
        """Return the best choice, priced by the original tables with their impossible entries."""
        messages = self.messages
        choice = messages.choice
        value = self._value(choice)
        return Residual(choice, value, min(messages.bound, value))

    def _value(self, choice: Mapping[int, int]) -> float:
        return math.fsum(
            float(table[tuple([choice[v] for v in scope])]) for scope, table in self.factors.items()
        )

    def _narrow(self) -> None:
        """Drop the strategies that no better choice has."""
        messages = self.messages
        excess, gap = messages.excess(), messages.value - messages.base
        remaining = {v: np.flatnonzero(over < gap) for v, over in excess.items()}
        if all(len(remaining[v]) for v in remaining):
            messages.narrow(remaining, messages.value)
        else:
            messages.bound = messages.value

    def _eliminate(self) -> None:
        """Solve exactly among the kept of so little excess that elimination ends."""
        messages = self.messages
        excess = messages.excess()
        steps = np.unique(np.concatenate(list(excess.values())))
        fewest, most, eliminated = 0, len(steps), None  # the number of steps is between these
        for halving in range(_HALVINGS):
            if fewest >= most:
                break
            middle = most if halving == 0 else (fewest + most + 1) // 2
            step = steps[middle - 1]
            candidates = {v: np.flatnonzero(o <= max(step, o.min())) for v, o in excess.items()}
            if self._can_eliminate(candidates):
                fewest, eliminated = middle, candidates
            else:
                most = middle - 1
        if eliminated is None:
            return
        choice, value = self._eliminated(eliminated)
        least = min(
            (
                float(np.delete(over, eliminated[v]).min(initial=np.inf))
                for v, over in excess.items()
            ),
            default=np.inf,
        )
        messages.offer(choice, value)
        messages.bound = max(messages.bound, min(messages.base + least, value, messages.value))

    def _can_eliminate(self, strategies: Mapping[int, Integers]) -> bool:
        """Return whether elimination ends, and soon, with these strategies."""
        sizes = {v: len(keep) for v, keep in strategies.items() if len(keep) > 1}
        neighbours: dict[int, set[int]] = {v: set() for v in sizes}
        for edge in self.messages.edges:
            if edge.low in sizes and edge.high in sizes:
                neighbours[edge.low].add(edge.high)
                neighbours[edge.high].add(edge.low)
        steps = elimination_order(sizes, neighbours, self.limit)
        return not neighbours and sum(step.entries for step in steps) <= _MOST_WORK

    def _eliminated(self, strategies: Mapping[int, Integers]) -> tuple[dict[int, int], float]:
        """Return the best choice with these strategies, and its cost."""
        messages = self.messages
        elimination = Elimination({v: len(keep) for v, keep in strategies.items()}, self.limit)
        for v, cost in messages.nodes.items():
            elimination.add((v,), cost[strategies[v]])
        for edge in messages.edges:
            low, high = edge.low, edge.high
            elimination.add((low, high), edge.table[np.ix_(strategies[low], strategies[high])])
        elimination.run()
        places = elimination.complete({})
        choice = {v: int(messages.strategies[v][strategies[v][s]]) for v, s in places.items()}
        return choice, elimination.constant

    def _by_constraints(self, deadline: float) -> None:
        """Solve by CP-SAT what messages leave, without the pairs that no better choice has."""
        messages = self.messages
        rest, gap = messages.rest(), messages.value - messages.base
        if sum(table.size for table in rest.values()) > _MOST_ENTRIES:
            return
        sizes = {v: len(names) for v, names in messages.strategies.items()}
        answer = solve_residual(
            sizes,
            {scope: np.where(table < gap, table, np.inf) for scope, table in rest.items()},
            tolerance=0.0,
            seconds=min(SECONDS, deadline - time.process_time()),
        )
        if answer.choice is not None:
            choice = {v: int(messages.strategies[v][s]) for v, s in answer.choice.items()}
            messages.offer(choice, self._value(choice))
        messages.bound = max(messages.bound, min(messages.base + answer.bound, messages.value))


def _finite(
    sizes: Mapping[int, int], factors: Factors
) -> tuple[dict[int, Array], dict[tuple[int, int], Array]]:
    """Return the tables of nodes and of pairs, with a finite cost above all others for infinity."""
    large = _large(factors)
    capped: dict[int, Array] = {}
    nodes = {v: np.zeros(size) for v, size in sizes.items()}
    edges: dict[tuple[int, int], Array] = {}
    for scope, table in factors.items():
        if id(table) not in capped:
            capped[id(table)] = np.where(np.isinf(table), large, table)
        if len(scope) == 1:
            nodes[scope[0]] = nodes[scope[0]] + capped[id(table)]
        else:
            edges[scope[0], scope[1]] = capped[id(table)]
    return nodes, edges


def _large(factors: Factors) -> float:
    """Return more than any table has, by more than all together may differ."""
    largest = spread = 0.0
    known: dict[int, tuple[float, float]] = {}
    for table in factors.values():
        if id(table) not in known:
            finite = table[np.isfinite(table)]
            known[id(table)] = (
                (float(np.abs(finite).max()), float(np.ptp(finite))) if len(finite) else (0.0, 0.0)
            )
        largest, spread = max(largest, known[id(table)][0]), spread + known[id(table)][1]
    return largest + (2 * spread or 1.0)
