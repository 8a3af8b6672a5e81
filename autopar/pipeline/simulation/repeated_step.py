"""Repeated step: the times of a schedule that repeats a part, without listing its actions.

    step, repeats = repeated_step(schedule)
    step.rank_times(table, repeats)    # when ranks end, and for how long they work

A *cut* is a place in each rank's order such that what comes before it waits for nothing behind it.
Between two cuts lies one period. The nodes before a cut that others behind it wait for are its
state. A period takes one state to the next: x'[i] is the largest A[i, j] + x[j]. That is a product
of matrices, with max for + and + for *, so n periods take the n-th power of A. No steady state is
assumed: with stages of many speeds it may come after hundreds of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import sub
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.schedule import RepeatedOrders, Schedule
from autopar.pipeline.simulation.action_costs import StageTimes
from autopar.pipeline.simulation.action_times import ActionTimes, MessageCosts
from autopar.pipeline.simulation.period_cuts import Cut, period_cuts
from autopar.pipeline.simulation.step_graph import (
    NEVER,
    START,
    Array,
    Links,
    Numbers,
    StepGraph,
    times_table,
)

WORTH = 2  # how often as long as its short form a schedule is for which a graph pays


@dataclass(frozen=True)
class RankTimes:
    """Hold what the price of a step follows from."""

    done: tuple[float, ...]  # by rank, the end of its last action
    busy: tuple[float, ...]  # by rank, the time for which it works
    sum_starts: Mapping[
        tuple[int, int], float
    ]  # by rank and stage, when its gradient starts to be summed

    @classmethod
    def of(cls, schedule: Schedule, times: ActionTimes) -> RankTimes:
        """Return those of a step whose actions have these times."""
        return cls(
            tuple(ends[-1] if ends else 0.0 for ends in times.ends),
            tuple(sum(map(sub, ends, starts)) for ends, starts in zip(times.ends, times.starts)),
            {
                (rank, stage): times.ends[rank][position]
                for rank, by_stage in enumerate(schedule.sum_positions)
                for stage, position in by_stage.items()
            },
        )


@dataclass(frozen=True)
class GraphSegment:
    """Compute some nodes of a graph, level by level, from the nodes of a state."""

    waits: Numbers  # by node, places in the values
    delays: Numbers
    times: Numbers
    counts: Numbers
    levels: tuple[tuple[int, int], ...]  # first and last node
    place: Numbers  # of each node of the graph in the values; -1: it is not there
    first: int  # place of the first node that is computed
    first_state: ClassVar[int] = 2  # place of the first of a state; before it: -inf, and 0

    @classmethod
    def of(cls, graph: StepGraph, nodes: Numbers, state: Numbers) -> GraphSegment:
        """Return the segment of `nodes`, which wait for one another and for `state` alone."""
        nodes = nodes[np.argsort(graph.level[nodes], kind="stable")]
        place, first = np.full(len(graph.times) + 2, -1), cls.first_state + len(state)
        place[[NEVER, START]] = 0, 1
        place[state] = np.arange(cls.first_state, first)
        place[nodes] = first + np.arange(len(nodes))
        ends = [*(1 + np.flatnonzero(np.diff(graph.level[nodes]))).tolist(), len(nodes)]
        return cls(
            place[graph.waits[nodes]],
            graph.delays[nodes],
            graph.times[nodes],
            graph.counts[nodes],
            tuple(zip([0, *ends], ends)),
            place,
            first,
        )

    def weights(self, table: Array) -> Array:
        """Return by node how long after each node that it waits for it ends."""
        return table[self.delays] + (table[self.times] * self.counts)[:, None]

    def run(self, table: Array, state: Array) -> Array:
        """Return all values, in columns as those of the `state`."""
        values = np.full((self.first + len(self.waits), state.shape[1]), -np.inf)
        values[1], values[self.first_state : self.first] = 0.0, state
        weights, computed = self.weights(table)[..., None], values[self.first :]
        for start, end in self.levels:
            after = values[self.waits[start:end]] + weights[start:end]
            computed[start:end] = after.max(axis=1)
        return values


@dataclass(frozen=True)
class RepeatedStep:
    """Hold the graph of a schedule in three segments, the middle one of which is repeated."""

    before: GraphSegment
    period: GraphSegment
    after: GraphSegment
    first_state: Numbers  # places in the values of `before`
    next_state: Numbers  # places in the values of `period`
    done: Numbers  # by rank, places in the values of `after`
    sum_starts: Mapping[tuple[int, int], int]  # by rank and stage, places there
    work: Array  # by rank and number of a time, how often its actions take that
    work_of_period: Array

    @classmethod
    def of(cls, graph: StepGraph, cuts: tuple[Cut, Cut], short: Schedule) -> RepeatedStep | None:
        """Return the graph with the part between two cuts repeated; None if it shows that more than
        that differs from one period to the next."""
        behind = [graph.position >= np.array(cut)[graph.rank] for cut in cuts]
        parts = [np.flatnonzero(np.sum(behind, axis=0) == number) for number in range(3)]
        first, last = (_state(graph, flags) for flags in behind)
        seen = [_seen_from(graph, state, cut) for state, cut in zip((first, last), cuts)]
        ordered = dict(zip(seen[1], last.tolist()))
        if ordered.keys() != set(seen[0]):
            return None
        last = np.array([ordered[node] for node in seen[0]])
        before = GraphSegment.of(graph, parts[0], np.zeros(0, np.int64))
        period = GraphSegment.of(graph, parts[1], first)
        after = GraphSegment.of(graph, parts[2], last)
        sum_starts = {
            (rank, stage): int(after.place[graph.ends[rank][position]])
            for rank, by_stage in enumerate(short.sum_positions)
            for stage, position in by_stage.items()
        }
        done = np.array([after.place[nodes[-1]] for nodes in graph.ends])
        if min(*sum_starts.values(), *done) < 0 or min(cuts[0]) < 1:
            return None
        times = 1 + 4 * short.stages * (1 + short.pipes)
        return cls(
            before,
            period,
            after,
            before.place[first],
            period.place[last],
            done,
            sum_starts,
            np.array([_work(graph, nodes, times) for nodes in graph.ends]),
            np.array([
                _work(graph, nodes[start:end], times)
                for nodes, start, end in zip(graph.ends, *cuts)
            ]),
        )  # fmt: skip

    def rank_times(self, table: Array, repeats: int) -> RankTimes:
        """Return the times of a step with so many periods more."""
        state = self.before.run(table, np.zeros((0, 1)))[self.first_state]
        matrix = self.period.run(table, self.identity)[self.next_state]
        state = _advance(matrix, state[:, 0], repeats + 1)
        values = self.after.run(table, state[:, None])[:, 0]
        busy = (self.work + repeats * self.work_of_period) @ table
        sum_starts = {key: float(values[place]) for key, place in self.sum_starts.items()}
        return RankTimes(tuple(values[self.done].tolist()), tuple(busy.tolist()), sum_starts)

    @cached_property
    def identity(self) -> Array:
        """Return the states of one node each, of which the columns of A follow."""
        return np.where(np.eye(len(self.first_state), dtype=bool), 0.0, -np.inf)


def _state(graph: StepGraph, is_behind: NDArray[np.bool_]) -> Numbers:
    """Return the nodes that are not behind a cut, and for which others behind it wait."""
    waited = np.unique(graph.waits[is_behind])
    waited = waited[waited >= 0]
    return waited[~is_behind[waited]]


def _seen_from(graph: StepGraph, nodes: Numbers, cut: Cut) -> list[tuple[int, int, int]]:
    """Return nodes as their rank, and the places of their action and of their own behind it."""
    seen = []
    for node in nodes.tolist():
        rank, position = int(graph.rank[node]), int(graph.position[node])
        seen.append((rank, position - cut[rank], node - int(graph.ends[rank][position])))
    return seen


def _work(graph: StepGraph, nodes: Numbers, times: int) -> Array:
    """Return by number of a time how often some nodes take it."""
    counts = np.zeros(times)
    np.add.at(counts, graph.times[nodes], graph.counts[nodes])
    return counts


def _advance(matrix: Array, state: Array, times: int) -> Array:
    """Return the state after so many periods."""
    while times > 2 * len(state):  # then a product of matrices saves more than it takes
        if times % 2:
            state = (matrix + state).max(axis=1)
        matrix = np.stack([(row[:, None] + matrix).max(axis=0) for row in matrix])
        times //= 2
    for _ in range(times):
        state = (matrix + state).max(axis=1)
    return state


def repeated_times(
    schedule: Schedule, durations: StageTimes, latency: float | MessageCosts
) -> RankTimes | None:
    """Return the times of a schedule that repeats a part often; None for others."""
    links = None
    if isinstance(latency, Mapping):
        links = tuple((route, cost.link) for route, cost in latency.items())
    repeated = repeated_step(schedule, links)
    return repeated and repeated.step.rank_times(
        times_table(schedule, durations, latency), repeated.repeats
    )


class Repeated(NamedTuple):
    """Say how often a step repeats its period beside the first one."""

    step: RepeatedStep
    repeats: int


def repeated_step(schedule: Schedule, links: Links | None = None) -> Repeated | None:
    """Return the graph of a schedule that repeats a part often; None for others.

    `links`: as `StepGraph.of` takes them.
    """
    orders = schedule.orders
    if not isinstance(orders, RepeatedOrders):
        return None
    if schedule.microbatches < WORTH * orders.short.microbatches:
        return None
    step = _step(orders.short, orders.period, links)
    return None if step is None else Repeated(step, orders.repeats)


@lru_cache(maxsize=64)
def _step(short: Schedule, period: int, links: Links | None) -> RepeatedStep | None:
    cuts = period_cuts(short, period)
    graph = None if cuts is None else StepGraph.of(short, links)
    return None if cuts is None or graph is None else RepeatedStep.of(graph, cuts, short)
