"""Keeping: of how many slices of the batch a schedule has its ranks keep something, and when.

plain            F keeps all activations, until B or W
recomputation    F keeps what was received, until B or W; B and I make the activations again,
                 I keeps them until W
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.pipeline.schedule import Schedule
from autopar.search.stages import Keeps, StageCost

Moment = Mapping[int, Keeps]  # what one rank keeps at one time, by stage


def course(schedule: Schedule, rank: int, recompute: bool) -> Iterator[Moment]:
    """What a rank keeps, each time that it has become more."""
    whole = dict.fromkeys((stage for _, stage in schedule.held_by(rank)), 0)
    received = dict(whole)
    makes = "BI" if recompute else "F"
    for action in schedule.orders[rank]:
        stage = action.stage
        for _ in action.microbatches:
            if action.kind in makes:
                whole[stage] += 1
            if action.kind == "F" and recompute:
                received[stage] += 1
            if action.kind in makes + "F":
                yield {stage: (whole[stage], received[stage]) for stage in whole}
            if action.kind in "BW":
                whole[stage] -= 1
                received[stage] -= recompute


def moments(schedule: Schedule, recompute: bool) -> list[Moment]:
    """What ranks keep when they keep most.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    found: list[Moment] = []
    for rank in range(schedule.ranks):
        seen = {tuple(moment.items()) for moment in course(schedule, rank, recompute)}
        flat = {one: [count for _, keeps in one for count in keeps] for one in seen}
        most = [
            one for one in seen if not any(one != o and _below(flat[one], flat[o]) for o in seen)
        ]
        found += map(dict, sorted(most))
    return found


def taken(stages: Sequence[StageCost], moment: Moment) -> float:
    """The bytes on a rank at a moment."""
    return sum(stages[stage].bytes(*keeps) for stage, keeps in moment.items())


def _below(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other))
