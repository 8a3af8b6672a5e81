"""Gradient synchronisation: all-reduces among the replicas of a stage, and among stages that share
parameters.

Where a rank starts a stage's sum is data of the schedule (`Schedule.sum_positions`):

- ``eager``: right after its last backward on the stage;
- ``eager-where-it-helps``: eagerly for the stages that leave their ranks idle between that moment
  and the rank's last action, as a running all-reduce slows the work beside it (Chimera's
  eager-sync-opt); at the end for the rest;
- ``lazy``: when a rank has done all its actions.

An all-reduce starts when all its ranks are ready. A rank runs one at a time, beside its actions.
The work that follows for its stages, such as updates on the host, begins after all of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from autopar.errors import require_one_of
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.timeline import Synchronization, Timeline, Update
from autopar.pipeline.sums import place_sums

Sync = Literal["eager", "eager-where-it-helps", "lazy"]
MODES: tuple[Sync, ...] = get_args(Sync)


def with_sums(schedule: Schedule, mode: str, simulated: Callable[[], Timeline]) -> Schedule:
    """Return the schedule with its sums where `mode` puts them; `simulated` returns its timeline,
    which tells where ranks idle."""
    require_one_of("sync, when gradients are synchronised", mode, MODES)
    if mode == "eager-where-it-helps":
        return place_sums(schedule, early_stages(simulated()))
    return place_sums(schedule, range(schedule.stages) if mode == "eager" else ())


def early_stages(timeline: Timeline) -> tuple[int, ...]:
    """Return the stages whose ranks all idle between last backward on it and last action."""
    schedule = timeline.schedule
    tolerance = 1e-9 * timeline.makespan

    def idles(stage: int, rank: int) -> bool:
        after = (-1, *schedule.gradient_positions[rank].get(stage, ()))[-1] + 1
        ends = [0.0, *timeline.ends[rank]]
        gaps = zip(timeline.starts[rank][after:], ends[after:])
        return any(start - end > tolerance for start, end in gaps)

    return tuple(
        stage
        for stage in range(schedule.stages)
        if all(idles(stage, rank) for rank in schedule.replicas_of(stage))
    )


def synchronize(
    timeline: Timeline,
    costs: tuple[float, ...],
    shared: Mapping[tuple[int, ...], float],
    after: tuple[float, ...],
) -> Timeline:
    """Return the timeline with the all-reduces of all stages, in the order in which they are ready.

    `costs`: seconds of each stage's all-reduce. `shared`: of stages that share parameters.
    `after`: seconds that a rank works for each of its stages when all gradients are summed.
    """
    schedule, done = timeline.schedule, timeline.rank_times.done
    stages = range(schedule.stages)
    starts = timeline.rank_times.sum_starts
    completed = [
        max(starts.get((rank, stage), 0.0) for rank in schedule.replicas_of(stage))
        for stage in stages
    ]
    every = {(stage,): cost for stage, cost in enumerate(costs)} | dict(shared)
    ready = [(max(completed[stage] for stage in group), group) for group in every]
    free = [0.0] * schedule.ranks
    all_reduces = []
    for begins, group in sorted(ready):
        ranks = schedule.holders(group)
        start = max([begins, *(free[rank] for rank in ranks)])
        end = start + every[group]
        for rank in ranks:
            free[rank] = end
        early = any(start < done[rank] for rank in ranks)
        all_reduces.append(Synchronization(group, ranks, start, end, early))
    updates = []
    for rank, begins in enumerate(map(max, free, done)):
        seconds = sum(after[stage] for stage in schedule.stages_on(rank))
        if seconds:
            updates.append(Update(rank, begins, begins + seconds))
    return dataclasses.replace(
        timeline, synchronizations=tuple(all_reduces), updates=tuple(updates)
    )
