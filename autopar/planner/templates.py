"""Templates: the questions that are asked first, as experts would write them down.

For each number of stages, mesh inside a stage, and number of micro-batches there is one: with the
states, the schedule and the recomputation that are estimated to be fastest in the memory there is.
The number of micro-batches is any divisor of the batch. What else such a size may be asked about
follows from the answer, by `rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.capture.captured import Captured
from autopar.mesh import Mesh
from autopar.passes.microbatches import batch_size
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import weighed_names
from autopar.planner.estimates import Estimates
from autopar.planner.question import MIXED, Mixed, Question, ScheduleName
from autopar.planner.schedule_lists import cut_of_microbatches, is_light
from autopar.recompute import Recompute
from autopar.states import States

MOST_SLOTS = 1 << 16  # stages times micro-batches of what is tried unasked


class Templates:
    """The first questions about a program, and what each may be varied to."""

    def __init__(self, program: Captured, request: Request, regions: Regions, blocks: int) -> None:
        """`blocks`: the equal blocks of the whole program."""
        self._program, self._request, self._blocks = program, request, blocks
        self.kinds: tuple[Recompute | Mixed, ...] = (regions.kinds[0],)
        if len(regions.kinds) > 1:
            self.kinds = (regions.kinds[0], MIXED)

    def first(self, estimates: Estimates, least_stages: int, *, is_large: bool) -> list[Question]:
        """Return the best guess for each size."""
        return [
            self.guess(size, estimates)
            for size in self._sizes(is_large=is_large)
            if size.stages >= least_stages
        ]

    def schedules(self, stages: int, parts: int) -> Sequence[Schedule | ScheduleName | None]:
        """Return the schedules to weigh; None alone without a pipeline."""
        if self._request.schedule is not None:
            return [self._request.schedule]
        if stages == 1:
            return [None]
        allowed = self._request.asynchronous
        names = weighed_names(stages, parts, self._blocks, asynchronous=allowed)
        ways = [ScheduleName(name, tuple(sorted(options.items()))) for name, options in names]
        cuts = [cut_of_microbatches(way, stages) for way in ways]
        is_free = self._request.microbatches is None
        return [w for w, cut in zip(ways, cuts) if cut == 1 or (is_free and parts % cut == 0)]

    def states(self, stages: int) -> Sequence[States]:
        """Return the settings of states to weigh, the simplest first."""
        return self._request.settings(stages)

    def normalised(self, question: Question) -> Question:
        """Return a question in the form that equal questions have."""
        is_shared = question.states.is_whole and question.recompute == self.kinds[0]
        if is_shared and self._request.states is None and question.memory == math.inf:
            return replace(question, has_own_layouts=False)
        return question

    def _sizes(self, *, is_large: bool) -> Iterator[Question]:
        request, rows = self._request, batch_size(self._program) or 1
        counts = [request.microbatches] if request.microbatches else _divisors(rows)
        for stages in request.stage_counts:
            for parts in counts:
                if request.microbatches or stages * parts <= MOST_SLOTS:
                    for mesh in self._meshes(stages, parts, is_large=is_large):
                        yield Question(self._program, (mesh,), stages, parts)

    def _meshes(self, stages: int, parts: int, *, is_large: bool) -> Sequence[Mesh]:
        meshes = self._request.meshes(stages, parts)
        return [mesh for mesh in meshes if not is_large or len(mesh.names) < 3] or meshes

    def guess(self, size: Question, estimates: Estimates) -> Question:
        """Return the way of this size that is estimated to be the fastest that fits."""
        schedules = self.schedules(size.stages, size.microbatches)
        has_own = self._request.states is not None
        base = replace(size, schedule=schedules[0], has_own_layouts=has_own)
        settings = product(self.states(size.stages), self.kinds)
        ways = [replace(base, states=states, recompute=kind) for states, kind in settings]
        best = self._best(ways, estimates)
        # What takes long to price is asked about when something like it is good.
        light = [s for s in schedules if s is None or is_light(s, size.stages)]
        pairs = product(light or schedules, self.kinds)
        return self._best(
            [replace(best, schedule=s, recompute=kind) for s, kind in pairs], estimates
        )

    def _best(self, ways: Sequence[Question], estimates: Estimates) -> Question:
        """Return the fastest of those that fit, else the smallest, as far as one can tell."""
        if len(ways) == 1:
            return ways[0]
        judged = [(estimates.of(way), way) for way in ways]
        fitting = [(e.seconds, way) for e, way in judged if e.bytes_ <= self._request.memory]
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1]
        return min(judged, key=lambda pair: pair[0].bytes_)[1]


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
