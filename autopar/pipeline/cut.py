"""Cut: the stages of a program for a schedule, fast, and within the memory of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.pipeline.schedule import Schedule
from autopar.search.stages import Line, Pin, StageCost, choose_stages


def cut_stages(
    line: Line, made: Schedule, *, pins: Sequence[Pin] = (), memory: float | None = None
) -> list[StageCost]:
    """Cut a rewritten program into the stages of a schedule, its slowest as fast as can be.

    `memory`: bytes that a rank may take, with what the schedule has it keep.
    """

    stages, most = choose_stages(line, made.stages, pins=pins), moments(made)
    if memory is None or all(_taken(stages, moment) <= memory for moment in most):
        return stages
    return choose_stages(line, made.stages, pins=pins, memory=memory, moments=most)


def moments(schedule: Schedule) -> list[Mapping[int, float]]:
    """What ranks keep when they keep most: by stage, something of how many micro-batches.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    found: list[Mapping[int, float]] = []
    for rank, order in enumerate(schedule.orders):
        kept = dict.fromkeys((stage for _, stage in schedule.held_by(rank)), 0.0)
        seen: set[tuple[float, ...]] = set()
        for action in order:
            change = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) / schedule.parts
            kept[action.stage] += change * len(action.microbatches)
            if change > 0:
                seen.add(tuple(kept.values()))
        most = [
            one for one in seen if not any(one != other and _below(one, other) for other in seen)
        ]
        found += [dict(zip(kept, one)) for one in sorted(most)]
    return found


def _below(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other))


def _taken(stages: Sequence[StageCost], moment: Mapping[int, float]) -> float:
    return sum(stages[stage].bytes(count) for stage, count in moment.items())
