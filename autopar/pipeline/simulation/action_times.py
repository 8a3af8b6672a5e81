"""When each action runs if every rank does its list in order, as soon as its input is there.

This is the executor's behaviour without the work: sends never block, a rank blocks on the input of
its next action. The checker looks for ranks that never finish, the simulator for the times.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.schedule import Action, Kind, Schedule

NEVER = math.inf


@dataclass(frozen=True)
class Passage:
    """What a message takes from rank to rank: of those that a rank sends over one link, the next
    leaves when the last has left."""

    leaves: float  # seconds of one micro-batch
    alpha: float  # seconds until what has left is there
    link: Hashable = None  # of its sender


# By pipe, the stage that a message comes from, and whether it goes forward.
Passages = Mapping[tuple[int, int, bool], Passage]


@dataclass(frozen=True)
class Times:
    """Starts and ends of actions by rank. A rank that waits forever has fewer than actions."""

    starts: list[list[float]]
    ends: list[list[float]]
    arrivals: list[float]  # of messages, by key
    # The ranks that wait forever, each with the key of the message.
    waiting: dict[int, int]


def run(
    schedule: Schedule,
    durations: Mapping[Kind, Sequence[float]],
    latency: float | Passages,
) -> Times:
    """Run every rank's list; `durations[kind][stage]` is the time of one micro-batch, `latency` of
    each message, or what it takes."""
    arrivals: list[float] = [NEVER] * (2 * schedule.stages * schedule.all_parts) + [0.0]
    waiting: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    passages, alpha = (latency, 0.0) if isinstance(latency, Mapping) else (None, latency)
    runnable = list(range(schedule.ranks))
    leaving: list[tuple[int, bool, Action]] = []
    free: dict[Hashable, float] = {}  # from when on a link of a rank is
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
            clock += durations[action.kind][action.stage] * len(action.microbatches)
            ended.append(clock)
            if sent >= 0:
                leaving.append((sent, is_crossing, action))
            if not action.overlaps:
                for sent, is_crossing, done in leaving:
                    if not is_crossing:
                        arrivals[sent] = clock
                    elif passages is not None:
                        passage = passages[done.pipe, done.stage, done.kind == "F"]
                        link = rank, passage.link
                        left = max(clock, free.get(link, 0.0))
                        left += passage.leaves * len(done.microbatches)
                        free[link], arrivals[sent] = left, left + passage.alpha
                    else:
                        arrivals[sent] = clock + alpha
                    if sent in waiting:
                        runnable.append(waiting.pop(sent))
                leaving.clear()
    return Times(starts, ends, arrivals, {rank: key for key, rank in waiting.items()})
