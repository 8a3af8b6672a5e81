"""Bound tables over pairs of nodes by sequential tree-reweighted message passing.

>>> apart = np.array([[0.0, 1.0], [1.0, 0.0]])
>>> costs = {0: np.array([0.0, 0.3]), 1: np.array([0.5, 0.0]), 2: np.zeros(2)}
>>> messages = MessagePassing(costs, {(0, 1): apart, (1, 2): apart, (0, 2): apart})
>>> messages.run(10)
>>> messages.choice, round(messages.value, 3), round(messages.bound, 3)
({0: 1, 1: 1, 2: 1}, 0.3, 0.3)

After Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (2006). A
message along an edge moves cost from its table to one of its ends. No choice costs more or less for
it. So whatever the messages, the least entries of all reduced tables add up to a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from autopar.solver.forests import Near, improved
from autopar.solver.packed_graph import Array, Integers

Pair = tuple[int, int]
_least = np.minimum.reduce  # without what numpy's own `min` asks first
Sent = Mapping[Pair, tuple[Array, Array]]  # the messages of each edge, to its low and its high node

_EPSILON = 8 * np.finfo(np.float64).eps  # of the few sums in one entry, relative to their terms
_STALLED = 1e-3  # of the gap: what a round has to close, or more of them are no use


class MessageEdge:
    """Hold a table over two nodes, both ways round, and the messages to them."""

    __slots__ = ("high", "largest", "low", "table", "to_high", "to_low", "turned")

    def __init__(self, low: int, high: int, table: Array, turned: Array) -> None:
        self.low, self.high, self.table, self.turned = low, high, table, turned
        self.largest = float(np.abs(table).max())
        self.to_low, self.to_high = np.zeros(table.shape[0]), np.zeros(table.shape[1])

    def left(self, high_share: Array) -> Array:
        """Return what the messages leave of the table, with a share of the high node's cost."""
        rest: Array = self.table - self.to_low[:, None] + (high_share - self.to_high)
        return rest


class MessagePassing:
    """Pass messages on a graph of finite tables; keep the best choice and bound so far."""

    def __init__(
        self, nodes: Mapping[int, Array], edges: Mapping[Pair, Array], sent: Sent | None = None
    ) -> None:
        self.nodes = {v: nodes[v] for v in sorted(nodes)}
        # What is left of each node's strategies, in the numbers of the caller.
        self.strategies = {v: np.arange(len(cost)) for v, cost in self.nodes.items()}
        self.choice: dict[int, int] = {}
        self.value, self.bound = np.inf, -np.inf
        self.base = -np.inf  # what the messages as they are prove by themselves: `bound` or less
        self._latest: dict[int, int] = {}  # the last choice on the way, in places of `strategies`
        self._improved = np.inf  # what the best cost when it was last made better
        self._dropped = np.inf  # the least that a choice with a strategy that is gone may cost
        self._place(edges, sent or {})

    @property
    def gap(self) -> float:
        return self.value - self.bound

    def run(self, rounds: int, tolerance: float = 0.0, deadline: float = np.inf) -> None:
        """Send messages forth and back until the gap is `tolerance` or hardly shrinks."""
        last = -np.inf
        for _ in range(rounds):
            self._forth()
            bound = self._back()
            gap = self.value - bound
            if gap <= tolerance or bound - last <= _STALLED * gap or time.process_time() > deadline:
                break
            last = bound
        self._certify()

    @property
    def sent(self) -> Sent:
        """Return all messages as they stand."""
        return {(edge.low, edge.high): (edge.to_low, edge.to_high) for edge in self.edges}

    def excess(self) -> dict[int, Array]:
        """Return for each strategy the least that a choice with it costs above `base`.
        That is how far its entries in what messages leave lie above the least ones."""
        excess = {v: self._free(v) for v in self.nodes}
        for v in self.nodes:
            share = self._own(v) * self.share[v]
            for edge in self.backward[v]:
                left = edge.left(share)
                least = left.min()
                excess[edge.low] = excess[edge.low] + (left.min(axis=1) - least)
                excess[v] = excess[v] + (left.min(axis=0) - least)
        return {v: cost - self._free(v).min() for v, cost in excess.items()}

    def rest(self) -> dict[tuple[int, ...], Array]:
        """Return what messages leave of all tables, none below 0: above `base` it is the cost."""
        reduced: dict[tuple[int, ...], Array] = {}
        for v in self.nodes:
            free = self._free(v)
            reduced[v,] = free - free.min()
            share = self._own(v) * self.share[v]
            for edge in self.backward[v]:
                left = edge.left(share)
                reduced[edge.low, v] = left - left.min()
        return reduced

    def narrow(self, left: Mapping[int, Integers], least: float) -> None:
        """Go on with fewer strategies, where those that are dropped cost at least `least`."""
        self._dropped = min(self._dropped, least)
        tables = {
            (edge.low, edge.high): edge.table[np.ix_(left[edge.low], left[edge.high])]
            for edge in self.edges
        }
        sent = {
            (edge.low, edge.high): (edge.to_low[left[edge.low]], edge.to_high[left[edge.high]])
            for edge in self.edges
        }
        self.nodes = {v: cost[left[v]] for v, cost in self.nodes.items()}
        self.strategies = {v: names[left[v]] for v, names in self.strategies.items()}
        self._place(tables, sent)

    def improve(self, moves: int) -> None:
        """Make the best and the latest choice better by moves, if their strategies remain."""
        neighbours: dict[int, Near] = {v: [] for v in self.nodes}
        for edge in self.edges:
            neighbours[edge.low].append((edge.high, edge.table))
            neighbours[edge.high].append((edge.low, edge.turned))
        places = {
            v: np.flatnonzero(names == self.choice[v]) for v, names in self.strategies.items()
        }
        starts = [self._latest]
        if self.value < self._improved and all(map(len, places.values())):
            starts.append({v: int(at[0]) for v, at in places.items()})
        for start in starts:
            choice = improved(self.nodes, neighbours, start, moves)
            value = math.fsum(float(cost[choice[v]]) for v, cost in self.nodes.items())
            value += math.fsum(float(e.table[choice[e.low], choice[e.high]]) for e in self.edges)
            self.offer({v: int(self.strategies[v][s]) for v, s in choice.items()}, value)
        self._improved = self.value

    def offer(self, choice: Mapping[int, int], value: float) -> None:
        """Keep a choice, in the caller's numbers, if it is the best so far."""
        if value < self.value:
            self.choice, self.value = dict(choice), value

    def _place(self, tables: Mapping[Pair, Array], sent: Sent) -> None:
        """Sort the edges by node: to those after it and to those before it."""
        turned: dict[int, Array] = {}
        self.forward: dict[int, list[MessageEdge]] = {v: [] for v in self.nodes}
        self.backward: dict[int, list[MessageEdge]] = {v: [] for v in self.nodes}
        self.edges: list[MessageEdge] = []
        for (low, high), table in sorted(tables.items(), key=lambda entry: entry[0]):
            if id(table) not in turned:
                turned[id(table)] = np.ascontiguousarray(table.T)
            edge = MessageEdge(low, high, table, turned[id(table)])
            if sent:
                edge.to_low, edge.to_high = sent[low, high]
            self.edges.append(edge)
            self.forward[low].append(edge)
            self.backward[high].append(edge)
        self.share = {
            v: 1.0 / max(len(self.forward[v]), len(self.backward[v]), 1) for v in self.nodes
        }

    def _own(self, v: int) -> Array:
        """Return the cost of a node with all messages to it."""
        total = self.nodes[v]
        for edge in self.forward[v]:
            total = total + edge.to_low
        for edge in self.backward[v]:
            total = total + edge.to_high
        return total

    def _free(self, v: int) -> Array:
        """Return what a node keeps of its cost, when its edges back have their shares."""
        return self._own(v) * (1 - self.share[v] * len(self.backward[v]))

    def _forth(self) -> None:
        """Send messages to later nodes; each node chooses on the way, given those before it."""
        choice: dict[int, int] = {}
        value = 0.0
        for v, cost in self.nodes.items():
            ahead: Array | float = 0.0
            for edge in self.forward[v]:
                ahead = ahead + edge.to_low
            total, partial_cost = cost + ahead, cost
            for edge in self.backward[v]:
                total = total + edge.to_high
                partial_cost = partial_cost + edge.table[choice[edge.low]]
            choice[v] = best = int((partial_cost + ahead).argmin())
            value += float(partial_cost[best])
            total = total * self.share[v]
            for edge in self.forward[v]:
                message = _least(edge.turned + (total - edge.to_low), 1)
                edge.to_high = message - _least(message)
        self._latest = choice
        if value < self.value:
            self.offer({v: int(self.strategies[v][s]) for v, s in choice.items()}, value)

    def _back(self) -> float:
        """Send messages to earlier nodes; return the bound, but for rounding."""
        bound = 0.0
        for v in reversed(self.nodes):
            total, earlier_edges = self._own(v), self.backward[v]
            share = total * self.share[v]
            bound += float(_least(total)) * (1 - self.share[v] * len(earlier_edges))
            for edge in earlier_edges:
                message = _least(edge.table + (share - edge.to_high), 1)
                least = _least(message)
                edge.to_low = message - least
                bound += float(least)
        return bound

    def _certify(self) -> None:
        """Take the bound from what the messages leave, less what may be lost to rounding."""
        least: list[float] = []
        rounding = 0.0
        for v in self.nodes:
            total, back = self._own(v), self.backward[v]
            rounding += float(np.abs(total).max()) * (len(self.forward[v]) + 2 * len(back) + 1)
            least.append(float(self._free(v).min()))
            share = total * self.share[v]
            for edge in back:
                least.append(float(edge.left(share).min()))
                rounding += edge.largest
                rounding += float(np.abs(edge.to_low).max() + np.abs(edge.to_high).max())
        self.base = float(math.fsum(least) - _EPSILON * rounding)
        self.bound = max(self.bound, min(self.base, self._dropped))
