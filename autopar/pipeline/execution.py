"""When each action runs if every rank does its list in order, as soon as its input is there.

This is the executor's behaviour without the work: sends never block, a rank blocks on the input of
its next action. The checker looks for ranks that never finish, the simulator for the times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Times:
    """Starts and ends of actions by rank. A rank that waits forever has fewer than actions."""

    starts: list[list[float]]
    ends: list[list[float]]
    # The ranks that wait forever, each with the key of the message.
    waiting: dict[int, int]


def inputs(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """For each action, the key of the message it waits for (-1: none) and of the one it sends.

    The output of F on a stage and of B or I on a stage, by the first of its micro-batches: those
    that are joined stay joined on all stages.
    """
    slices, stages = schedule.slices, schedule.stages
    last, gradients = stages - 1, stages * slices
    found = []
    for order in schedule.orders:
        keys = []
        for action in order:
            kind, stage = action.kind, action.stage
            key = stage * slices + action.microbatches[0]
            if kind == "F":
                keys.append((key - slices if stage else -1, key))
            elif kind == "W":
                keys.append((-1, -1))
            else:
                key += gradients
                keys.append((key + slices if stage < last else -1, key))
        found.append(keys)
    return found


def hops(schedule: Schedule, latency: float) -> dict[str, list[list[float]]]:
    """By kind, pipe and stage: how long what an action sends is under way."""
    forward, backward = [], []
    for ranks in schedule.placement:
        crossing = [0.0 if here == there else latency for here, there in pairwise(ranks)]
        forward.append([*crossing, 0.0])
        backward.append([0.0, *crossing])
    none = [[0.0] * schedule.stages] * schedule.pipes
    return {"F": forward, "B": backward, "I": backward, "W": none}


def run(
    schedule: Schedule,
    durations: Mapping[str, Sequence[float]],
    latency: float,
) -> Times:
    """Run every rank's list; `durations[kind][stage]` is the time of one micro-batch."""
    keys = inputs(schedule)
    delays = hops(schedule, latency)
    slices, ranks = schedule.slices, schedule.ranks
    arrivals: list[float] = [-1.0] * (2 * schedule.stages * slices + 1)
    waiting: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in range(ranks)]
    ends: list[list[float]] = [[] for _ in range(ranks)]
    runnable = list(range(ranks))
    held_back: tuple[int, float] | None = None
    while runnable:
        rank = runnable.pop()
        order, messages, begun, ended = schedule.orders[rank], keys[rank], starts[rank], ends[rank]
        clock = ended[-1] if ended else 0.0
        for position in range(len(ended), len(order)):
            awaited, sent = messages[position]
            if awaited >= 0:
                arrival = arrivals[awaited]
                if arrival < 0.0:
                    waiting[awaited] = rank
                    break
                if arrival > clock:
                    clock = arrival
            action = order[position]
            if action.overlaps:
                awaited = messages[position + 1][0]
                if awaited >= 0:
                    arrival = arrivals[awaited]
                    if arrival < 0.0:
                        waiting[awaited] = rank
                        break
                    if arrival > clock:
                        clock = arrival
            kind, stage = action.kind, action.stage
            begun.append(clock)
            clock += durations[kind][stage] * len(action.microbatches)
            ended.append(clock)
            if sent >= 0:
                delay = delays[kind][action.pipe][stage]
                if action.overlaps:
                    held_back = (sent, delay)
                    continue
                arrivals[sent] = clock + delay
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
            if held_back is not None:
                sent, delay = held_back
                held_back = None
                arrivals[sent] = clock + delay
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
    return Times(starts, ends, {rank: key for key, rank in waiting.items()})
