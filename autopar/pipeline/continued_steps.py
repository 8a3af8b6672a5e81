"""Continued steps: those of an asynchronous schedule, which follow one another without a drain.

    steps = ContinuedSteps(schedule("pipedream-2bw", stages=4, microbatches=4))
    steps.order(rank=0, step=7)    # what rank 0 does between its updates of step 6 and of step 7

Forwards of the next steps run before the update of this one. Micro-batches are numbered through all
steps. The first step has the warm-up; each later one repeats the second, one period further.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache

from autopar.pipeline.checker import check
from autopar.pipeline.schedule import UPDATE, Action, Kind, Schedule
from autopar.pipeline.schedules import schedule as make_schedule

Order = tuple[Action, ...]


@lru_cache(maxsize=64)
def continued(schedule: Schedule, steps: int) -> Schedule:
    """Return an asynchronous schedule of one step with so many steps instead, checked."""
    options = {**dict(schedule.options), "steps": steps}
    steps_in_a_row = make_schedule(
        schedule.name,
        stages=schedule.ranks,
        microbatches=schedule.microbatches,
        **options,
    )
    check(steps_in_a_row)
    return steps_in_a_row


def in_steady_state(schedule: Schedule) -> Schedule:
    """Return a schedule in which ranks hold at most what they ever hold: of an asynchronous one
    several steps, which begin before the step before has drained."""
    return ContinuedSteps(schedule).listed if any(schedule.delays) else schedule


class ContinuedSteps:
    """The orders of a schedule's steps when each begins before the one before it has drained."""

    def __init__(self, schedule: Schedule) -> None:
        """`schedule`: of one step, with one update of each stage."""
        self.one_step, self.period = schedule, schedule.microbatches
        # A rank runs at most as many forwards ahead as there are stages.
        ahead = -(-schedule.stages // self.period)
        self.listed = continued(schedule, ahead + 2)
        self._segments = [_segments(order)[:2] for order in self.listed.orders]
        self._places = [
            {(a.kind, a.stage, a.microbatches[0]): at for at, a in enumerate((*first, *second))}
            for first, second in self._segments
        ]
        self._last = [
            {(a.kind, a.stage): a.microbatches[0] for a in second} for _, second in self._segments
        ]

    @cached_property
    def ahead(self) -> int:
        """Return of how many later steps a rank runs forwards in one step, at most."""
        last = max(a.microbatches[-1] for _, second in self._segments for a in second)
        return last // self.period - 1

    def order(self, rank: int, step: int, end: int | None = None) -> Order:
        """Return the actions of a rank from its update of the step before to that of `step`.

        `end`: the number of all steps; None: there are more than any rank looks ahead."""
        shift = max(0, step - 1) * self.period
        return tuple(
            _shifted(action, shift)
            for action in self._segments[rank][min(step, 1)]
            if end is None or action.microbatches[-1] + shift < end * self.period
        )

    def step_of(self, microbatch: int) -> int:
        """Return the step to which a micro-batch belongs."""
        return microbatch // self.period

    def place(self, rank: int, kind: Kind, stage: int, microbatch: int) -> int:
        """Return the position of an action among those of a rank in endless steps."""
        later = microbatch - self._last[rank][kind, stage]
        periods = max(0, -(-later // self.period))
        known = self._places[rank][kind, stage, microbatch - periods * self.period]
        return known + periods * len(self._segments[rank][1])

    def last_place(self, rank: int, step: int) -> int:
        """Return the position of the update of a step in a rank's endless steps."""
        first, second = self._segments[rank]
        return len(first) + step * len(second) - 1


def _segments(order: Order) -> list[Order]:
    """Cut an order behind each update."""
    segments, begin = [], 0
    for at, action in enumerate(order):
        if action.kind == UPDATE:
            segments.append(order[begin : at + 1])
            begin = at + 1
    return segments


def _shifted(action: Action, microbatches: int) -> Action:
    return replace(action, microbatches=tuple(m + microbatches for m in action.microbatches))
