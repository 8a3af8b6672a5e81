"""Price a schedule: times of all actions, idle time, activations, gradient synchronisation.

>>> from autopar.pipeline import schedule
>>> timeline = simulate(schedule("chimera", stages=4, microbatches=4), forward=1, backward=2)
>>> timeline.peak_activations
(3.0, 4.0, 4.0, 3.0)
>>> print(timeline)
chimera: 4 ranks, 4 micro-batches, makespan 16, bubble 25.0%
rank 0 |F0 F1 ...f2 b2    f3 b3    ...B0    ......B1    |
rank 1 |...F0 f2 F1 f3 ...b2    B0    b3    B1    ......|
rank 2 |...f2 F0 f3 F1 ...B0    b2    B1    b3    ......|
rank 3 |f2 f3 ...F0 B0    F1 B1    ...b2    ......b3    |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType

from autopar.errors import InvalidInput
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.action_costs import (
    Costs,
    StageTimes,
    per_stage,
    single,
    stage_times,
)
from autopar.pipeline.simulation.action_times import ActionTimes, MessageCosts, time_actions
from autopar.pipeline.simulation.repeated_step import RankTimes, repeated_times
from autopar.pipeline.simulation.synchronization import Sync, synchronize, with_sums
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.weight_versions import count_updates
from autopar.text.units import counted

_NONE: Mapping[tuple[int, ...], float] = MappingProxyType({})


def simulate(
    schedule: Schedule,
    forward: Costs = 1,
    backward: Costs = 2,
    *,
    backward_weight: Costs | None = None,
    latency: float = 0,
    sync: Sync | None = None,
    sync_cost: Costs = 0,
    after_sync: Costs = 0,
    activation: Costs = 1,
    message_costs: MessageCosts | None = None,
    shared_sync: Mapping[tuple[int, ...], float] = _NONE,
    slice_times: Sequence[float] | None = None,
) -> Timeline:
    """Return the timeline of one step.

    A cost is one number, the time of a rank for one micro-batch on its stages of one pipe (chunks
    share it), or a number for each stage.

    - `backward`: both halves of it; `backward_weight`: its W, where it is split (half by default).
    - `latency`: the time of a message between two ranks; `message_costs`: the cost of each.
    - `sync`: when the replicas of a stage all-reduce its gradient (see `synchronization`; None: as
      the schedule lists it, or else eagerly); `sync_cost`: the time of that; `shared_sync`: by
      their numbers, the time for stages that share parameters; `after_sync`: the work for a stage
      when all gradients are summed.
    - `activation`: the size that a micro-batch keeps for backward, 1 by default.
    - `slice_times`: the time of each slice of a sequence, as a part of that of a micro-batch; None:
      as their lengths.
    """
    times = stage_times(
        schedule.stages,
        forward,
        backward,
        backward_weight=backward_weight,
        chunks=schedule.chunks,
        parts=schedule.parts,
    )
    delay = single("latency", latency)
    shares = per_stage("activation", activation, schedule.stages, schedule.chunks)
    count = schedule.parts * schedule.slice_count
    activations = tuple(share / count for share in shares)
    of_slices = _slice_shares(schedule, slice_times)
    latencies = delay if message_costs is None else message_costs

    def timeline_of(variant: Schedule) -> Timeline:
        timed = cache(partial(_time_all_actions, variant, times, latencies, of_slices))
        figures = repeated_times(variant, times, latencies) or RankTimes.of(variant, timed())
        return Timeline(variant, figures, timed, activations)

    is_summed = sync is not None or bool(shared_sync)
    for cost in (sync_cost, after_sync):
        is_summed |= any(cost) if isinstance(cost, Sequence) else cost != 0
    if is_summed and (updates := count_updates(schedule)) > 1:
        raise InvalidInput(
            "sums of gradients are priced in a schedule of one update",
            got=f"{schedule.name} with {counted(updates, 'update')} of each stage",
            remedy="leave sync, sync_cost, after_sync and shared_sync out",
        )
    if sync is not None:
        schedule = with_sums(schedule, sync, lambda: timeline_of(schedule))
    costs, after = (
        per_stage(name, cost, schedule.stages, schedule.chunks)
        for name, cost in (("sync_cost", sync_cost), ("after_sync", after_sync))
    )
    timeline = timeline_of(schedule)
    if sync is None and not any((*costs, *after, *shared_sync.values())):
        return timeline
    return synchronize(timeline, costs, shared_sync, after)


def _slice_shares(schedule: Schedule, times: Sequence[float] | None) -> tuple[float, ...]:
    """Return the time of each slice, as a part of a micro-batch's; none without slices."""
    if times is None:
        return tuple(length / sum(schedule.slices) for length in schedule.slices)
    if len(times) != len(schedule.slices) or min(times, default=0) < 0:
        raise InvalidInput(
            "slice_times has a time for each slice of a sequence",
            got=f"{[*times]} for {counted(len(schedule.slices), 'slice')}",
            remedy="give the schedule slices, and each of them a time of at least 0",
        )
    return tuple(times)


def _time_all_actions(
    schedule: Schedule,
    durations: StageTimes,
    latency: float | MessageCosts,
    shares: Sequence[float],
) -> ActionTimes:
    """Return the times of all actions; raise `InvalidInput` if ranks wait forever."""
    result = time_actions(schedule, durations, latency, shares)
    if sum(map(len, result.ends)) != len(schedule.actions):
        check(schedule)
    return result
