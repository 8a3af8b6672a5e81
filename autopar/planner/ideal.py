"""Ideal: what a step takes at least, before any layout or stage is looked at.

    ideal = Ideal(captured, request)
    ideal.run(64)                         # of the program, on a 64th of the work of each operator
    ideal.may_win(2, 8, schedules, 0.1)   # a step in 2 stages and 8 micro-batches, in 0.1 s

Operators alone, each cut over all ranks that share it; nothing moves, nobody waits but for the
order of the schedule. What is not faster than this even so is never built.
"""

from __future__ import annotations

import math
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

MOST_ACTIONS = 1 << 10  # stages times micro-batches of what a bound is looked for


class Ideal:
    """What the operators of a program take, the less the more ranks and micro-batches share it."""

    def __init__(self, captured: Captured, request: Request) -> None:
        self._captured, self._request = captured, request
        self.run = cache(self._run)
        self._last: tuple[Candidate | None, float] = None, 0.0
        # Of schedules: a bound, and what was enough when it was looked for.
        self._ratios: dict[Schedule, tuple[float, float]] = {}

    def may_win(
        self, stages: int, parts: int, schedules: Sequence[Schedule] | None, fastest: float
    ) -> bool:
        """Whether a step of so many stages and micro-batches may take less than `fastest`."""
        run = self.run(parts * self._request.meshes(stages)[0].size, stages > 1)
        if schedules is None or parts / stages * run >= fastest:  # though nobody waits
            return parts / stages * run < fastest
        times = fastest / run if run else math.inf
        return any(not self._takes(made, parts, times) for made in schedules)

    def is_slower(self, laid: Candidate, made: Schedule, fastest: float) -> bool:
        """Whether a program with its layouts takes `fastest` at least, in whatever stages."""
        once = self._once(laid)
        return self._takes(made, laid.microbatches, fastest / once if once else math.inf)

    def _once(self, laid: Candidate) -> float:
        """What stages take together for one micro-batch, without what is done once a step."""
        if laid is not self._last[0]:
            work, moves = laid.run.worked, laid.run.moved
            once = work.forward + work.backward + moves.forward + moves.backward
            self._last = laid, once
        return self._last[1]

    def _takes(self, made: Schedule, parts: int, times: float) -> bool:
        """Whether a schedule takes so many times what one micro-batch takes, at least. Of parts of
        micro-batches nothing is known."""
        if made.all_parts != parts or times == math.inf or made.stages * parts > MOST_ACTIONS:
            return False
        least, asked = self._ratios.get(made, (0.0, 0.0))
        if least < times and asked < times:
            least = least_time(made, enough=times)
            self._ratios[made] = least, times
        return least >= times

    def _run(self, pieces: int, is_staged: bool = False) -> float:
        """Seconds, forward and backward, of one run on a part of the work of each operator: on the
        fastest devices, where stages may be large on these."""
        total, cluster = 0.0, self._request.cluster
        device = cluster.strongest(range(cluster.devices)) if is_staged else cluster.device
        for facts, done, count in self._work:
            part = Work(*(each / pieces for each in done))
            forward, backward = seconds(facts, part, device)
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
