"""Ideal: what a step takes at least, before any layout or stage is looked at.

    ideal = Ideal(captured, request)
    ideal.run(64)                         # of the program, on a 64th of the work of each operator
    ideal.may_win(2, 8, schedules, 0.1)   # a step in 2 stages and 8 micro-batches, in 0.1 s

Operators alone, each cut over all ranks that share it; nothing moves, nobody waits but for the
order of the schedule. What is not faster than this even so is never built.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

from autopar.capture.captured import Captured
from autopar.capture.origins import copied_parameter
from autopar.cost.operators import Work, seconds
from autopar.cost.whole_work import whole_work
from autopar.pipeline.least_time import least_time
from autopar.pipeline.schedule import Schedule
from autopar.planner.candidate import Candidate
from autopar.planner.request import Request
from autopar.strategies.node_info import info
from autopar.strategies.rule import Facts


class Ideal:
    """What the operators of a program take, the less the more ranks and micro-batches share it."""

    def __init__(self, captured: Captured, request: Request) -> None:
        self._captured, self._request = captured, request
        self.run, self._ratio = cache(self._run), cache(least_time)

    def may_win(
        self, stages: int, parts: int, schedules: Sequence[Schedule] | None, fastest: float
    ) -> bool:
        """Whether a step of so many stages and micro-batches may take less than `fastest`."""
        run = self.run(parts * self._request.meshes(stages)[0].size)
        if schedules is None or parts / stages * run >= fastest:  # though nobody waits
            return parts / stages * run < fastest
        return any(self._times(made, parts) * run < fastest for made in schedules)

    def of(self, laid: Candidate, made: Schedule) -> float:
        """Seconds of a step of a program with its layouts, in whatever stages."""
        return self._times(made, laid.microbatches) * laid.cost.compute / laid.microbatches

    def _times(self, made: Schedule, parts: int) -> float:
        """How many times what one micro-batch takes; of parts of these nothing is known."""
        return self._ratio(made) if made.all_parts == parts else 0.0

    def _run(self, pieces: int) -> float:
        """Seconds, forward and backward, of one run on a part of the work of each operator."""
        total = 0.0
        for facts, done, count in self._work:
            part = Work(*(each / pieces for each in done))
            forward, backward = seconds(facts, part, self._request.cluster.device)
            total += count * float(forward[0] + backward[0])
        return total

    @cached_property
    def _work(self) -> list[tuple[Facts, Work, int]]:
        """Of each kind of operator that every micro-batch runs on the devices, and how many."""
        counted = (
            node
            for node in self._captured.operators
            if info(node).learns and not info(node).on_host and copied_parameter(node) is None
        )
        return whole_work(self._captured, counted)
