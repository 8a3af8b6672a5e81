"""Pipelines: programs with their layouts in the stages of a pipeline, by every schedule.

pipelines = Pipelines(request, blocks, regions_of, pins, about, is_huge)
pipelines.ways(laid, 8, 64)   # in eight stages and 64 micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from autopar.candidates.candidate import Candidate
from autopar.capture.annotations import Pin
from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.stretch import NotAlike
from autopar.planner.ideal import Ideal
from autopar.planner.ledger import Ledger
from autopar.planner.promises import Promises, Size
from autopar.planner.recomputation import Regions
from autopar.planner.request import Request
from autopar.planner.staged import StagedProgram, StagedWay, Tried
from autopar.recompute import Recompute


class Pipelines:
    """The ways to run programs in stages."""

    def __init__(
        self,
        request: Request,
        blocks: int,
        regions_of: Callable[[Candidate], Regions],
        pins: Sequence[Pin],
        about: tuple[Ledger, Promises, Ideal],
        is_huge: bool,
    ) -> None:
        """`blocks`: the equal blocks of the program; `regions_of`: what of one may run again;
        `about`: what came of other ways, what these promise, and what they take at least;
        `is_huge`: what takes long to look at is left where it is not likely to win."""
        self._ledger, self._promises, self._ideal = about
        self._request, self._memory, self._is_huge = request, request.memory, is_huge
        self._regions_of, self._pins = regions_of, pins
        self.schedules = cache(partial(request.schedules, blocks=blocks))
        self._tried: dict[int, Tried] = {}  # by layouts

    def tried(self, laid: Candidate) -> Tried:
        """What is known of these layouts, with any states."""
        own = laid.decisions.strategies
        return self._tried.setdefault(id(own), Tried(own))

    def has_tried(self, laid: Candidate) -> bool:
        """Whether any way with these layouts was looked at."""
        return id(laid.decisions.strategies) in self._tried

    def staged(self, laid: Candidate, stages: int) -> StagedProgram:
        """The program, to be cut into so many stages."""
        about = self._request, self._regions_of(laid), self._pins, self.tried(laid)
        return StagedProgram(laid, stages, *about)

    def ways(
        self, laid: Candidate, stages: int, parts: int, is_leaner: bool = False
    ) -> Iterator[Candidate]:
        """By every schedule; `is_leaner`: what its regions keep is kept elsewhere, where they are
        too large though all run again. Of what a short program cannot tell is counted how much."""
        ledger, regions = self._ledger, self._regions_of(laid)
        tried, program = self.tried(laid), self.staged(laid, stages)
        is_hosted = laid.states.is_on_host
        # Cutting the states of the same layouts makes a way no faster, or by what it hides: little.
        is_deep = self._is_huge or laid.captured.times > 1
        is_known = is_deep or laid.states.is_whole
        kinds, last = regions.staged, regions.staged[-1]
        if is_leaner:
            kinds = regions.leaner(self._request.cluster.device.host)
        note = tried.note if self._is_huge or not is_leaner else lambda memory: None
        for number, made in enumerate(self.schedules(stages, parts)):
            # The order of a large schedule takes longer to look at than the stages of a program.
            if self._ideal.is_slower(laid, made, ledger.fastest, has_order=not self._is_huge):
                ledger.left_out["schedules"] += 1
                continue
            if is_leaner:
                known = tried.seconds.get((number, last), math.inf)
                if known >= ledger.fastest or not program.lacks_room(made, last, self._memory):
                    continue
            taken = dict[Recompute, float]()  # with these states
            for kind in kinds:
                ledger.go_on()
                in_pieces = kind.keep == "cut"  # which takes longer; the next may not
                if is_known and tried.seconds.get((number, kind), 0.0) >= ledger.fastest:
                    if in_pieces:
                        continue
                    break
                try:
                    way = self._fastest(program, made, kind, stages)
                except NotAlike:
                    ledger.left_out["unlike"] += 1
                    continue
                if way is None:
                    break
                tried.seconds.setdefault((number, kind), way.seconds)
                taken[kind] = way.seconds
                if in_pieces and (whole := taken.get(Recompute(kind.kind))):
                    self._promises.note_pieces(way.seconds / whole)
                is_faster = way.seconds < ledger.fastest
                is_hopeless = is_faster and way.spread > self._memory
                is_tight = is_hopeless or (is_faster and not way.fits(self._memory))
                ledger.is_bound |= is_tight or not (is_deep or way.fits(self._memory))
                if is_faster and not is_hopeless:
                    size = Size(stages, parts, is_hosted)
                    self._promises.note(kind, size, way.needed(self._memory))
                is_cut = is_tight and not is_hopeless and self._is_worth_cutting(made)
                if is_cut:
                    way = program.within(made, kind, self._memory) or way
                is_open = way.seconds < ledger.fastest and way.least <= self._memory
                if is_open or not self._is_huge:
                    note(way.candidate.needed(self._memory))
                    yield way.candidate
                elif is_tight:
                    note(way.least)
                    ledger.pass_over(way)
                if is_hopeless:
                    note(way.spread)
                    return  # with every schedule, whatever is recomputed
                is_bare = self._is_huge and not is_cut and way.barest > self._memory
                if is_bare or not (is_tight or in_pieces):
                    break  # in these stages, whatever is recomputed

    def _fastest(
        self, program: StagedProgram, made: Schedule, kind: Recompute, stages: int
    ) -> StagedWay | None:
        """The fastest stages of a schedule. Those with several chunks want more than others: only
        these fail."""
        try:
            return program.fastest(made, kind)
        except InvalidInput:
            if made.stages == stages or made is self._request.schedule:
                raise
            return None

    def _is_worth_cutting(self, made: Schedule) -> bool:
        """Whether to look for stages that fit: not for those of large programs that share their
        ranks, which takes seconds, where something fits and the schedule is one of many."""
        is_one = not self._is_huge or self._request.schedule is not None
        return is_one or made.pipes == made.chunks == 1 or self._ledger.kept.best is None
