"""Choose: how many stages, which layouts inside them, how many micro-batches, which schedule.

Every candidate has the layouts that the search finds for its own mesh and micro-batch, is cut into
stages by predicted seconds, and priced by simulating its schedule; where that does not fit into
memory, so are stages that recompute, and stages cut so that every rank keeps within it. The fastest
that fits is taken; the figures of all are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from torch import nn

from autopar.capture.annotations import parameter_annotations, stage_pins
from autopar.capture.captured import Captured
from autopar.errors import ExecutionError, InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.activation_counts import peaks
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.costs import StageCost
from autopar.pipeline.stages.cut import choose_stages
from autopar.planner.candidate import Alternative, Candidate
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.request import Request
from autopar.progress import Report
from autopar.search.auto import too_early, was_interrupted
from autopar.search.constraints import Constraints, read_constraints
from autopar.search.smallest_footprint import NothingFits, SmallestFootprint
from autopar.states import States

ATTEMPTS = 4  # at layouts so lean that the stages fit
EQUAL = 1e-9  # relative: what differs by less is as fast, and the first is taken
LEANER = 0.9  # than their memory asks for: few layouts are in between


class Planner:
    """Makes and prices the candidates of a request; what they share is made once."""

    def __init__(
        self, model: nn.Module, captured: Captured, request: Request, report: Report
    ) -> None:
        self.captured, self.request, self.report = captured, request, report
        self.memory = request.memory
        self._annotations, self._pins = parameter_annotations(model), stage_pins(model)
        self._batches = cache(partial(cut_batch, captured))
        self._best: Candidate | None = None  # the fastest that fits
        self._fastest = math.inf  # its seconds
        self._weighed: list[Alternative] = []
        self._too_large: list[SmallestFootprint] = []
        self._layouts = Layouts(request, self.constraints, report)
        self._is_bound = False  # memory kept the last layouts from what would be faster
        self._is_interrupted = False  # then the best so far is taken, though something is left

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All that was weighed, the best first."""
        seconds = {id(one): float(f"{one.seconds:.9g}") for one in self._weighed}
        return tuple(sorted(self._weighed, key=lambda one: (not one.fits, seconds[id(one)])))

    def best(self) -> Candidate:
        """The fastest way to run a step, of those that are asked for and fit."""
        reasons: list[str] = []
        left = sizes = list(self.request.sizes())
        while left and not self._is_interrupted:
            stages, parts = left[0]
            size = f"{stages} stages, {parts} micro-batches"
            try:
                self.report("pipeline", size)
                for candidate in self._candidates(stages, parts):
                    self._weigh(candidate)
            except (KeyboardInterrupt, ExecutionError) as error:
                if not was_interrupted(error):
                    raise
                self._is_interrupted = True
                break
            except NothingFits as error:
                self._too_large.append(error.smallest.in_stages(stages))
            except InvalidInput as error:
                if len(sizes) == 1:
                    raise
                reasons.append(f"{size}: {error.rule}: {error.got}")
            left = left[1:]
        if self._best is None:
            raise self._nothing(reasons)
        search = self._best.search
        return self._best.changed(search.cut_short()) if search and left else self._best

    def constraints(self, program: Captured, mesh: Mesh) -> Constraints:
        """What annotations ask for."""
        if self.request.mode == "data":
            return Constraints()
        return read_constraints(program, mesh, self._annotations)

    def _weigh(self, candidate: Candidate) -> None:
        figures = candidate.alternative(self.memory)
        self._weighed.append(figures)
        if not figures.fits:
            self._too_large.append(candidate.footprint(figures))
        elif figures.seconds < self._fastest * (1 - EQUAL):
            self._best, self._fastest = candidate, figures.seconds
        if candidate.search is not None and candidate.search.interrupted:
            self._is_interrupted = True

    def _nothing(self, reasons: Sequence[str]) -> Exception:
        """Why there is no plan."""
        if self._is_interrupted:
            return too_early()
        if self._too_large:
            least = min(self._too_large, key=lambda footprint: footprint.memory)
            may_recompute = self.request.schedule is not None and not self.request.recompute
            return NothingFits.of(self.memory, replace(least, may_recompute=may_recompute))
        return InvalidInput(
            "a model can be run in some number of stages and micro-batches",
            got="\n".join(dict.fromkeys(reasons)),
            remedy="fix fewer of mesh, pipeline, microbatches and memory",
        )

    def _candidates(self, stages: int, parts: int) -> Iterator[Candidate]:
        """Every way with this many stages and micro-batches.

        States that are cut take no less time than whole ones: they are weighed where memory binds,
        first with the fastest layouts; layouts of their own are searched for if none of these fit.
        """
        asked = self._layout_request(stages, parts)
        whole, *others = self.request.settings(stages)
        refused: list[NothingFits] = []
        found: list[bool] = []  # of each candidate, whether it fits

        def weighed(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
            try:
                for candidate in candidates:
                    found.append(candidate.memory.peak <= self.memory)
                    yield candidate
            except NothingFits as error:
                refused.append(error)

        self._is_bound = False
        yield from weighed(self._with_states(replace(asked, states=whole), stages, parts))
        is_decided = self._is_interrupted or not (self._is_bound or refused)
        if others and not is_decided:
            yield from weighed(self._placed(asked, others, stages, parts))
        for states in others if self.request.mode == "auto" else ():
            if is_decided or any(found):
                break
            yield from weighed(self._with_states(replace(asked, states=states), stages, parts))
        if not found and refused:
            raise min(refused, key=lambda error: error.smallest.memory)
        self._too_large += [error.smallest.in_stages(stages) for error in refused]

    def _layout_request(self, stages: int, parts: int) -> LayoutRequest:
        """The fastest layouts, whatever they need."""
        is_straight = stages == 1 and self.request.schedule is None
        batches = None if is_straight and parts == 1 else self._batches(parts)
        program = self.captured if batches is None else batches.captured
        offered = self.request.meshes(stages)
        return LayoutRequest(program, batches, offered, math.inf, is_straight)

    def _placed(
        self, asked: LayoutRequest, settings: Sequence[States], stages: int, parts: int
    ) -> Iterator[Candidate]:
        """Every way with the fastest layouts and one of some settings of states."""
        whole, _ = self._layouts.find(asked)
        for states in settings:
            laid = whole.placed(states)
            if not laid.decisions.apart or self._is_interrupted:
                return
            if asked.is_all:
                search = whole.search and whole.search.taken(laid.cost.seconds)
                yield laid.changed(search)
            else:
                yield from self._pipelined(laid, stages, parts)

    def _with_states(self, asked: LayoutRequest, stages: int, parts: int) -> Iterator[Candidate]:
        """Every way with one setting of states, and the fastest layouts that leave it room."""
        # Each stage has a share of the states, and at least the activations of one micro-batch.
        limit = least = self.memory * stages
        impossible = 0.0  # bytes that no layouts fit in
        for attempt in range(ATTEMPTS):
            try:
                laid, needed = self._layouts.find(replace(asked, memory=limit))
            except NothingFits:
                if not attempt:
                    raise
                impossible, limit = limit, (limit + least) / 2
                continue
            search = laid.search
            self._is_bound |= search is not None and search.multiplier > 0
            if asked.is_all:
                self._is_bound |= laid.memory.peak > self.memory
                yield laid
                return
            # A pipeline without bubbles gives every stage its part of the work.
            if search is not None and search.objective / stages >= self._fastest:
                return
            taken = math.inf
            for candidate in self._pipelined(laid, stages, parts):
                yield candidate
                taken = min(taken, candidate.memory.peak)
            if taken <= self.memory or search is None:
                return
            # Stages are uneven, and keep several micro-batches: leaner layouts may leave room.
            asked = replace(asked, offered=[laid.mesh])
            least = min(limit, needed)
            limit = max(LEANER * least * self.memory / taken, (impossible + least) / 2)

    def _pipelined(self, laid: Candidate, stages: int, parts: int) -> Iterator[Candidate]:
        """A program with its layouts in so many stages, by every schedule."""
        asked, axis, pins = self.request, self.request.axis, self._pins
        assert axis is not None
        mesh = asked.whole_mesh(laid.mesh, stages)
        line = laid.stage_costs(mesh, axis)
        lines = {False: line, True: line.recomputed()}
        fastest = cache(lambda count, again: choose_stages(lines[again], count, pins=pins))

        def piped(made: Schedule, stages: Sequence[StageCost], again: bool) -> Candidate:
            pipelining = Pipelining(axis, mesh, made, tuple(stages), again)
            search = laid.search and laid.search.shared(made.ranks)
            return laid.changed(search, pipelining)

        for made in asked.schedules(stages, parts):
            for again in (False, True) if asked.schedule is None else (asked.recompute,):
                try:
                    way = piped(made, fastest(made.stages, again), again)
                except InvalidInput:
                    # Schedules with several chunks want more stages than others: only they fail.
                    if made.stages == stages or made is asked.schedule:
                        raise
                    break
                is_tight = way.memory.peak > self.memory and way.seconds < self._fastest
                self._is_bound |= is_tight
                if is_tight:
                    kept, room = peaks(made, again), self.memory
                    with suppress(InvalidInput):
                        cut = choose_stages(
                            lines[again], made.stages, pins=pins, memory=room, peaks=kept
                        )
                        way = piped(made, cut, again)
                yield way
                if not is_tight:
                    break
