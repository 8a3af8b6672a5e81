"""Keeping: of how many slices of the batch a schedule has its ranks keep something, and when.

plain            F keeps what was received and all activations, until B or I
recomputation    F keeps what was received, until B or I, which make the activations again
split backward   I keeps what the gradients of weights are made of, until W
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.costs import StageCost
from autopar.pipeline.stages.table import Live


def live_microbatches(schedule: Schedule, rank: int, recompute: bool) -> Iterator[Live]:
    """What a rank keeps, each time that it has become more."""
    kept = {stage: [0, 0, 0] for _, stage in schedule.local_stages(rank)}
    makes = "BI" if recompute else "F"

    def moment() -> Live:
        return {stage: (whole, received, later) for stage, (whole, received, later) in kept.items()}

    for action in schedule.orders[rank]:
        here = kept[action.stage]
        for _ in action.microbatches:
            if action.kind == "W":
                here[2] -= 1
                continue
            if action.kind == "F":
                here[1] += 1
            if action.kind in makes:
                here[0] += 1
            if action.kind in makes + "F":
                yield moment()
            if action.kind in "BI":
                here[0] -= 1
                here[1] -= 1
            if action.kind == "I":
                here[2] += 1
                yield moment()


def peaks(schedule: Schedule, recompute: bool) -> list[Live]:
    """What ranks keep when they keep most.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    found: list[Live] = []
    for rank in range(schedule.ranks):
        seen = {tuple(moment.items()) for moment in live_microbatches(schedule, rank, recompute)}
        flat = {one: [count for _, keeps in one for count in keeps] for one in seen}
        most = [
            one for one in seen if not any(one != o and _below(flat[one], flat[o]) for o in seen)
        ]
        found += map(dict, sorted(most))
    return found


def bytes_held(stages: Sequence[StageCost], moment: Live) -> float:
    """The bytes on a rank at a moment."""
    return sum(stages[stage].bytes(*keeps) for stage, keeps in moment.items())


def _below(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other))
