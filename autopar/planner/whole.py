"""Whole: the program that a short one stands for, and ways to run it that were found on that.

whole = Whole(short, request)
whole.of(candidate)          # the same way, of the whole program
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from math import isclose

from autopar.capture.captured import Captured
from autopar.capture.shortened import Shortened
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.pipeline.stages.stretch import NotAlike
from autopar.planner.candidate import Candidate
from autopar.planner.lengthened import lengthened, recomputed
from autopar.planner.recomputation import Regions
from autopar.planner.request import Request
from autopar.recompute import Recompute

_CLOSE = 1e-6  # relative


class Whole:
    """A whole program; it is cut into micro-batches when these are asked for."""

    def __init__(self, short: Shortened, request: Request) -> None:
        self.short, self._memory = short, request.memory
        self.regions = Regions(short.whole, request.recompute)
        self._batches = cache(partial(cut_batch, short.whole))

    def program(self, batches: Microbatches | None) -> tuple[Captured, Microbatches | None]:
        """In as many micro-batches as the short one."""
        if batches is None:
            return self.short.whole, None
        made = self._batches(batches.count)
        return made.captured, made

    def recomputed(self, decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
        """What is decided of regions of the short program, of those of the whole one."""
        return recomputed(decided, self.short, (*self.regions.fixed, *self.regions.free))

    def of(self, found: Candidate) -> Candidate:
        """The same layouts, states, stages and recomputation."""
        if found.captured.times == 1:
            return found
        about = self.program(found.batches)
        return lengthened(found, self.short, *about, self.recomputed(found.decisions.recompute))

    def same(self, found: Candidate) -> Candidate:
        """The same, which must take what it is said to take on the short program."""
        made = self.of(found)
        if not isclose(found.seconds, made.seconds, rel_tol=_CLOSE) or not made.fits(self._memory):
            raise NotAlike
        return made
