"""Action times: start and end of each action if every rank does its list in order.

This is the executor's behaviour without the work: sends never block, a rank blocks until the input
of its next action has arrived. The checker looks for deadlocks, the simulator for times.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.schedule import Action, Kind, Schedule

NEVER = math.inf


@dataclass(frozen=True)
class MessageCost:
    """Price a message between two ranks; messages of a rank over one link leave one by one."""

    leaves: float  # seconds that one micro-batch occupies the link
    alpha: float  # seconds of latency, from leaving to arrival
    link: Hashable = None  # of its sender


# By pipe, sending stage, and whether the message goes forward.
MessageCosts = Mapping[tuple[int, int, bool], MessageCost]


@dataclass(frozen=True)
class ActionTimes:
    """List starts and ends of actions by rank; a rank that waits forever has fewer than actions."""

    starts: list[list[float]]
    ends: list[list[float]]
    arrivals: list[float]  # of messages, by key
    # The ranks that wait forever, each with the key of the message.
    waiting: dict[int, int]


def time_actions(
    schedule: Schedule,
    durations: Mapping[Kind, Sequence[float]],
    latency: float | MessageCosts,
    shares: Sequence[float] = (),
) -> ActionTimes:
    """Return when each rank does its list; `durations[kind][stage]` is for one micro-batch.

    `latency`: seconds of every message, or the cost of each. `shares`: how much of a micro-batch's
    time each slice of its tokens takes.
    """
    arrivals: list[float] = [NEVER] * (2 * schedule.stages * schedule.all_parts) + [0.0]
    waiting: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    costs, alpha = (latency, 0.0) if isinstance(latency, Mapping) else (None, latency)
    runnable = list(range(schedule.ranks))
    leaving: list[tuple[int, bool, Action]] = []
    free: dict[Hashable, float] = {}  # when each link of a rank is free again
    while runnable:
        rank = runnable.pop()
        order, messages = schedule.orders[rank], schedule.messages[rank]
        begun, ended = starts[rank], ends[rank]
        clock = ended[-1] if ended else 0.0
        for position in range(len(ended), len(order)):
            action = order[position]
            awaited, sent, is_crossing = messages[position]
            arrival = arrivals[awaited]
            if action.overlaps and arrivals[messages[position + 1][0]] > arrival:
                awaited = messages[position + 1][0]
                arrival = arrivals[awaited]
            if arrival > clock:
                if arrival == NEVER:
                    waiting[awaited] = rank
                    break
                clock = arrival
            begun.append(clock)
            if action.kind in durations:  # sums run beside later actions
                work = durations[action.kind][action.stage] * len(action.microbatches)
                if shares and action.kind != "U":
                    work *= shares[schedule.slice_of(action.microbatches[0])[1]]
                clock += work
            ended.append(clock)
            if sent >= 0:
                leaving.append((sent, is_crossing, action))
            if not action.overlaps:
                for sent, is_crossing, done in leaving:
                    if not is_crossing:
                        arrivals[sent] = clock
                    elif costs is not None:
                        cost = costs[done.pipe, done.stage, done.kind == "F"]
                        link = rank, cost.link
                        left = max(clock, free.get(link, 0.0))
                        part = 1.0
                        if shares:  # of a message: as long as its slice
                            length = schedule.slices[schedule.slice_of(done.microbatches[0])[1]]
                            part = length / sum(schedule.slices)
                        left += cost.leaves * len(done.microbatches) * part
                        free[link], arrivals[sent] = left, left + cost.alpha
                    else:
                        arrivals[sent] = clock + alpha
                    if sent in waiting:
                        runnable.append(waiting.pop(sent))
                leaving.clear()
    return ActionTimes(starts, ends, arrivals, {rank: key for key, rank in waiting.items()})
