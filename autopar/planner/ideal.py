"""Ideal: what a step takes at least, before any layout or stage is looked at.

    ideal = Ideal(captured, request, room)
    ideal.run(64)                         # of the program, on a 64th of the work of each operator
    ideal.may_win(2, 8, schedules, 0.1)   # a step in 2 stages and 8 micro-batches, in 0.1 s

Operators alone, each cut over all ranks that share it; nothing moves, nobody waits but for the
order of the schedule, and no more runs again than has to, to fit. What is not faster than the best
so far even so is never built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property

from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.cluster import Device
from autopar.cost.unsharded_work import (
    UnshardedWork,
    runs_each_microbatch,
    spread_seconds,
    unsharded_work,
)
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.compute_lower_bound import least_time
from autopar.planner.request import Request
from autopar.planner.room import MOST_ACTIONS, Room


class Ideal:
    """What the operators of a program take, the less the more ranks and micro-batches share it."""

    def __init__(self, captured: Captured, request: Request, room: Room) -> None:
        self._captured, self._request, self.room = captured, request, room
        self.run, self.shared = cache(self._run), cache(self._shared)
        self._last: tuple[Candidate | None, float] = None, 0.0
        # Of schedules: a bound, and what was enough when it was looked for.
        self._ratios: dict[Schedule, tuple[float, float]] = {}

    def may_win(
        self,
        stages: int,
        parts: int,
        schedules: Sequence[Schedule] | None,
        fastest: float,
        least: float = 0.0,
        is_hosted: bool = False,
    ) -> bool:
        """Whether a step of so many stages and micro-batches may take less than `fastest`; `least`:
        what it takes if nothing runs again, as far as that is known; `is_hosted`: with states on
        the host."""
        inner, times = self._request.inner(stages), parts / stages
        run = self.run(parts * inner, stages > 1)
        least = max(least, times * run)
        if schedules is None:
            return least + times * self.room.least_again(parts, parts * inner, is_hosted) < fastest
        if least >= fastest:  # though nobody waits, and nothing runs again
            return False
        for made in schedules:
            has_room = self.room.holds(self.room.last, made, inner, is_hosted)
            again = 0.0 if has_room else self.room.again(parts * inner)
            is_open = least + times * again < fastest
            if is_open and not self._takes(made, parts, run + again, fastest):
                return True
        return False

    def is_slower(
        self, laid: Candidate, made: Schedule, fastest: float, has_order: bool = True
    ) -> bool:
        """Whether a program with its layouts takes `fastest` at least, in whatever stages;
        `has_order`: even if its ranks wait only as the order of the schedule asks for."""
        parts, inner = laid.microbatches, laid.mesh.size
        is_hosted = laid.states.is_on_host
        has_room = self.room.holds(self.room.last, made, inner, is_hosted)
        if has_room and not has_order:
            return False
        once = self._once(laid) + (0.0 if has_room else self.room.again(parts * inner))
        if parts / made.ranks * once >= fastest:
            return True
        return has_order and self._takes(made, parts, once, fastest)

    def _once(self, laid: Candidate) -> float:
        """What stages take together for one micro-batch, without what is done once a step."""
        if laid is not self._last[0]:
            work, moves = laid.run.worked, laid.run.moved
            once = work.forward + work.backward + moves.forward + moves.backward
            self._last = laid, once
        return self._last[1]

    def _takes(self, made: Schedule, parts: int, once: float, fastest: float) -> bool:
        """Whether a schedule takes `fastest` at least, where one micro-batch takes `once`. Of parts
        of micro-batches nothing is known."""
        times = fastest / once if once else math.inf
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
        cluster = self._request.cluster
        device = cluster.strongest(range(cluster.devices)) if is_staged else cluster.device
        return sum(spread_seconds(self._work, pieces, device))

    def _shared(self, pieces: int) -> float:
        """The same where each device has as much of the work as it is fast."""
        cluster, kinds = self._request.cluster, Counter[Device]()
        for node, used in zip(cluster.nodes, cluster.used_of_nodes):
            kinds[node.device] += used
        taken = {kind: sum(spread_seconds(self._work, pieces, kind)) for kind in kinds}
        if not all(taken.values()):
            return 0.0
        return cluster.devices / sum(count / taken[kind] for kind, count in kinds.items())

    @cached_property
    def _work(self) -> UnshardedWork:
        """Of each kind of operator that every micro-batch runs on the devices, and how many."""
        return unsharded_work(
            self._captured, filter(runs_each_microbatch, self._captured.operators)
        )
