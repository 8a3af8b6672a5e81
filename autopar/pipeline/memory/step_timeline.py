"""Course of a step: the bytes that a rank makes, by kind, action by action or call by call.

The most of it at one time is what `most_in_step` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.memory.memory_timeline import ProgramCourse
from autopar.pipeline.memory.moments import Moment
from autopar.pipeline.memory.step_memory import (
    KINDS,
    READING,
    Held,
    Part,
    StageMemory,
    counts_by_action,
    kinds_of,
    most_of,
)
from autopar.pipeline.schedule import Schedule, one_stage

_AGAIN = (Part.B_AGAIN, Part.B_LAST)  # gradients of parameters are there from runs before
_LAST = (Part.B_LAST, Part.B_ONLY)  # these are summed


def course_of_step(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> list[Held]:
    """When each action of a rank takes most."""
    held = [stages[stage] for stage in schedule.stages_on(rank)]
    return [most_of(counts, held) for counts in counts_by_action(schedule, rank, stages)]


def course_by_call(
    program: StageMemory, course: ProgramCourse, microbatches: int
) -> list[list[tuple[str, Held]]]:
    """Without a pipeline: of each run, forward or backward, what there is as calls make their
    results, by their names."""
    return [
        [
            (moment.call, held)
            for (counts,) in rows
            for moment, held in _moments(program.made, counts, course)
        ]
        for rows in counts_by_action(one_stage(microbatches), 0, {0: program})
    ]


def _moments(
    made: NDArray[np.float64], counts: NDArray[np.int64], course: ProgramCourse
) -> Iterator[tuple[Moment, Held]]:
    """Those of the run that is on its way, beside what else there is."""
    running = next((part for part in range(Part.F, len(Part)) if counts[part]), None)
    if running is None:
        return
    reads = running >= Part.F_READING
    run = Part(running - READING * reads)
    beside = dict(zip(KINDS, counts[: Part.F] @ made[: Part.F]))
    for moment in course.forward if run == Part.F else course.backward:
        if (moment.copies is not None) == reads:
            own = kinds_of(moment, run in _AGAIN, run in _LAST)
            yield moment, {kind: float(size) + own[kind] for kind, size in beside.items()}
