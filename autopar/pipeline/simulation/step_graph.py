"""Step graph: when actions and sends of a schedule end, each as the latest of a few others.

The ends are nodes. A node ends its own time after the latest of those that it waits for: the action
before it on its rank, messages, the message before it on its link. Times are numbers of a table, so
that one graph serves for all stages, machines and layouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.schedule import KINDS, Kind, Schedule
from autopar.pipeline.simulation.action_times import MessageCosts

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
Route = tuple[int, int, bool]  # of a message: its pipe, its sending stage, whether it goes forward
Links = tuple[tuple[Route, Hashable], ...]
NEVER, START = -2, -1  # instead of a node that is waited for: nobody, the start of the step


class StepNode(NamedTuple):
    """Describe a node as a row of the graph's arrays."""

    time: int  # the number of its own time
    uses: int  # how often it takes that: once for each micro-batch
    waits: tuple[int, int, int]  # other nodes
    delays: tuple[int, int]  # numbers of times: since the second and the third of them
    level: int  # more than that of any node that it waits for
    rank: int
    position: int  # of its action in the order of the rank


@dataclass(frozen=True)
class StepGraph:
    """Hold the nodes of a step, each behind those that it waits for."""

    times: Numbers
    counts: Numbers
    waits: Numbers  # by node, three nodes
    delays: Numbers  # by node and node that it waits for
    level: Numbers
    rank: Numbers
    position: Numbers
    ends: tuple[Numbers, ...]  # by rank, the nodes of its actions

    @classmethod
    def of(cls, schedule: Schedule, links: Links | None) -> StepGraph | None:
        """Return the graph; None if ranks wait forever.

        `links`: the link of each message between ranks, over which they leave one by one; None:
        they all leave at once.
        """
        nodes, ends = _listed(schedule, links)
        if sum(map(len, ends)) < len(schedule.actions):
            return None
        times, counts, waits, delays, level, rank, position = zip(*nodes)
        columns = (np.array(column) for column in (times, counts, waits, level, rank, position))
        times_, counts_, waits_, level_, rank_, position_ = columns
        delays_ = np.concatenate([np.zeros((len(nodes), 1), np.int64), np.array(delays)], axis=1)
        rows = tuple(map(np.array, ends))
        return cls(times_, counts_, waits_, delays_, level_, rank_, position_, rows)


def _listed(schedule: Schedule, links: Links | None) -> tuple[list[StepNode], list[list[int]]]:
    """Return the nodes, and those of the actions by rank: fewer where a rank waits forever."""
    nodes: list[StepNode] = []
    ends: list[list[int]] = [[] for _ in schedule.orders]
    link_of = None if links is None else dict(links)
    arrivals: dict[int, tuple[int, int]] = {-1: (NEVER, 0)}  # by message: node, number of a delay
    sent_before: dict[Hashable, int] = {}  # by link, the node of the last message
    waiting: dict[int, int] = {}
    runnable, stages = list(range(schedule.ranks)), schedule.stages

    def add(
        time: int, count: int, waits: tuple[int, int, int], delays: tuple[int, int], at: int
    ) -> int:
        """Add a node of the rank that is followed, and return its number."""
        level = 1 + max(nodes[node].level if node >= 0 else -1 for node in waits)
        nodes.append(StepNode(time, count, waits, delays, level, rank, at))
        return len(nodes) - 1

    while runnable:
        rank = runnable.pop()
        order, messages, ended = schedule.orders[rank], schedule.messages[rank], ends[rank]
        for position in range(len(ended), len(order)):
            action, awaited = order[position], messages[position][0]
            other = messages[position + 1][0] if action.overlaps else -1
            late = next((key for key in (awaited, other) if key not in arrivals), None)
            if late is not None:
                waiting[late] = rank
                break
            (node, delay), (node_2, delay_2) = arrivals[awaited], arrivals[other]
            before = ended[-1] if ended else START
            count = len(action.microbatches) if action.kind in KINDS else 0
            time = 1 + KINDS.index(action.kind) * stages + action.stage if count else 0
            end = add(time, count, (before, node, node_2), (delay, delay_2), position)
            ended.append(end)
            if action.overlaps:  # it sends with the next one
                continue
            first = position - (position > 0 and order[position - 1].overlaps)
            for done, (_, sent, is_crossing) in zip(
                order[first : position + 1], messages[first : position + 1]
            ):
                if sent < 0:
                    continue
                arrivals[sent] = end, 0
                if is_crossing:
                    route = done.pipe, done.stage, done.kind == "F"
                    number = _number_of(route, stages)
                    arrivals[sent] = end, number + 1
                    if link_of is not None:
                        link, count = (rank, link_of[route]), len(done.microbatches)
                        waits = end, NEVER, sent_before.get(link, NEVER)
                        left = sent_before[link] = add(number, count, waits, (0, 0), position)
                        arrivals[sent] = left, number + 1
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
    return nodes, ends


def _number_of(route: Route, stages: int) -> int:
    """Return the number of the time for which a message leaves; that of its latency is next."""
    pipe, stage, is_forward = route
    return 1 + len(KINDS) * stages + 4 * (pipe * stages + stage) + 2 * is_forward


def times_table(
    schedule: Schedule, durations: Mapping[Kind, Sequence[float]], latency: float | MessageCosts
) -> Array:
    """Return the times by their numbers, of which 0 is none; `latency` as in `time_actions`."""
    stages = schedule.stages
    past = 1 + len(KINDS) * stages
    table = np.zeros(past + 4 * schedule.pipes * stages)
    table[1:past] = [time for kind in KINDS for time in durations[kind]]
    if isinstance(latency, Mapping):
        for route, cost in latency.items():
            number = _number_of(route, stages)
            table[number : number + 2] = cost.leaves, cost.alpha
    else:
        table[past + 1 :: 2] = latency
    return table
