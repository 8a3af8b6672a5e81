"""Schedules by their names: their actions are listed when these are needed.

>>> listed(ScheduleName("1f1b"), 2, 4).microbatches
4
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import schedule, schedule_of_parts
from autopar.pipeline.schedules.registry import GENERATORS
from autopar.planner.question import ScheduleName

_LIGHT = 5000  # forwards in the part that a schedule repeats, and before it


@lru_cache(1 << 8)
def listed(name: Schedule | ScheduleName, stages: int, parts: int) -> Schedule:
    """Return the actions of a schedule; refuse one that does not exist for these numbers.

    `parts`: the micro-batches of the program, of which two are one of backward halving.
    """
    if isinstance(name, Schedule):
        return name
    options: dict[str, Any] = dict(name.options)
    return schedule_of_parts(name.name, stages=stages, parts=parts, **options)


@lru_cache(1 << 10)
def cut_of_microbatches(name: ScheduleName, stages: int) -> int:
    """Return into how many parts a schedule cuts each micro-batch: the least one shows it."""
    options: dict[str, Any] = dict(name.options)
    for count in (1, 2, stages, 2 * stages):
        with suppress(InvalidInput):  # it does not exist for these numbers
            return schedule(name.name, stages=stages, microbatches=count, **options).parts
    return 1


def is_light(name: Schedule | ScheduleName, stages: int) -> bool:
    """Return whether a schedule is priced fast, however many micro-batches there are: the part that
    it repeats is short."""
    if isinstance(name, Schedule):
        return True
    period = GENERATORS[name.name].period(stages, **dict(name.options))
    chunks = dict(name.options).get("chunks", 1)
    assert isinstance(chunks, int)
    return period is not None and period.settled * stages * chunks <= _LIGHT
