"""Choose: how many stages, which layouts inside them, how many micro-batches, which schedule.

Every candidate has the layouts that the search finds for its own mesh and micro-batch, is cut into
stages by predicted seconds, and priced by simulating its schedule. Where memory is short, so are
programs that recompute some regions, and stages cut so that every rank keeps within it. The fastest
that fits is taken; the figures of all are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from torch import nn

from autopar.capture.annotations import (
    devices_of,
    marked_regions,
    parameter_annotations,
    stage_pins,
)
from autopar.capture.captured import Captured
from autopar.errors import ExecutionError, InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.activation_counts import peaks
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.costs import StageCost
from autopar.pipeline.stages.cut import choose_stages
from autopar.planner.candidate import Alternative, Candidate, no_room_on_host
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.recomputation import KINDS, PLAIN, Regions, mixed_problem
from autopar.planner.request import Request
from autopar.progress import Report
from autopar.recompute import Recompute
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
        self.regions = Regions(captured, request.recompute, marked_regions(model))
        self._batches = cache(partial(cut_batch, captured))
        self._best: Candidate | None = None  # the fastest that fits
        self._fastest = math.inf  # its seconds
        self._weighed: list[Alternative] = []
        self._too_large: list[SmallestFootprint] = []
        self._too_large_for_host: list[Candidate] = []
        self._hosted = request.hosted if self._may_go(model) else ()
        self._layouts = Layouts(request, self.constraints, report)
        self._is_bound = False  # memory kept the last layouts from what would be faster
        self._is_interrupted = False  # then the best so far is taken, though something is left

    def _may_go(self, model: nn.Module) -> bool:
        """Whether states may go to the host; refuse them where a module is to be on the device."""
        devices = devices_of(model)
        stays = [(path, at) for path, (device, at) in devices.items() if device == "device"]
        within = [path for path, (device, _) in devices.items() if device == "host"]
        stays = [one for one in stays if not any(f"{one[0]}.".startswith(f"{p}.") for p in within)]
        asked = self.request.states
        if stays and asked is not None and asked.optimizer_device == "host":
            raise InvalidInput(
                "a module that is to be on the device has no states on the host",
                got=f"{stays[0][0]}, with states {asked}",
                remedy='no device="device" for it, or states on the device',
                source=stays[0][1],
            )
        return not stays

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

    def constraints(
        self, program: Captured, decided: Mapping[str, Recompute], mesh: Mesh
    ) -> Constraints:
        """What annotations ask for, where these regions are recomputed."""
        if self.request.mode == "data":
            return Constraints(recompute=decided)
        return replace(read_constraints(program, mesh, self._annotations), recompute=decided)

    def _weigh(self, candidate: Candidate) -> None:
        figures = candidate.alternative(self.memory)
        self._weighed.append(figures)
        if candidate.memory.peak <= self.memory and not candidate.fits_host:
            self._too_large_for_host.append(candidate)
        elif not figures.fits:
            self._too_large.append(candidate.footprint(figures))
        elif figures.seconds < self._fastest * (1 - EQUAL):
            self._best, self._fastest = candidate, figures.seconds
        if candidate.search is not None and candidate.search.interrupted:
            self._is_interrupted = True

    def _nothing(self, reasons: Sequence[str]) -> Exception:
        """Why there is no plan."""
        if self._is_interrupted:
            return too_early()
        if self._too_large_for_host:
            return no_room_on_host(self._too_large_for_host)
        if self._too_large:
            least = min(self._too_large, key=lambda footprint: footprint.memory)
            may_recompute = self.regions.kinds == (PLAIN,) and bool(self.regions.free)
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
        Then, without a pipeline, regions are recomputed; in one, they are for each schedule. States
        go to the host at last.
        """
        asked = self._layout_request(stages, parts)
        whole, *others = self.request.settings(stages)
        refused: list[NothingFits] = []
        found: list[bool] = []  # of each candidate, whether it fits

        def weighed(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
            try:
                for candidate in candidates:
                    found.append(candidate.fits(self.memory))
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
        if len(self.regions.kinds) > 1 and not is_decided:
            settings = (whole, *others)
            if asked.is_all:
                yield from weighed(self._recomputing(asked, settings))
            elif not any(found):
                lean = self.regions.all(self.regions.kinds[-1])
                leaner = replace(asked, states=settings[-1], recompute=lean)
                yield from weighed(self._with_states(leaner, stages, parts))
        if self._hosted and not (is_decided or any(found)):
            yield from weighed(self._on_host(asked, found, stages, parts))
        if not found and refused:
            raise min(refused, key=lambda error: error.smallest.memory)
        self._too_large += [error.smallest.in_stages(stages) for error in refused]

    def _on_host(
        self, asked: LayoutRequest, found: Sequence[bool], stages: int, parts: int
    ) -> Iterator[Candidate]:
        """At last, with states on the host; `found` grows by whether each of these fits."""
        self.report("memory", "states on the host")
        settings = self._hosted
        yield from self._placed(asked, settings, stages, parts)
        free, _ = self._layouts.find(asked)
        for states in settings if asked.is_all and len(self.regions.kinds) > 1 else ():
            way = None if any(found) else self._mixed(free.placed(states))
            if way is not None:
                yield way.changed(way.search and way.search.taken(way.cost.seconds))
        for states in settings if self.request.mode == "auto" else ():
            if not any(found):
                yield from self._with_states(replace(asked, states=states), stages, parts)

    def _recomputing(self, asked: LayoutRequest, settings: Sequence[States]) -> Iterator[Candidate]:
        """Ways in which some regions are recomputed, so that they fit: with the layouts that are
        best without a limit or, where none of these fits, if all regions are recomputed."""
        self.report("memory", "recomputing regions")
        free, _ = self._layouts.find(asked)
        sources = [free, *(free.placed(states) for states in settings[1:])]
        ways = [way for way in map(self._mixed, sources) if way is not None]
        if not ways and free.search is not None:
            lean = self.regions.all(self.regions.kinds[-1])
            asked = replace(asked, memory=self.memory, states=settings[-1], recompute=lean)
            source, _ = self._layouts.find(asked)
            ways = [self._mixed(source) or source]
        for way in ways:
            account = way.search
            if account is not None and free.search is not None:
                # No plan that fits is faster than the best without a limit.
                account = account.made(way.seconds, free.search.bound)
            yield way.changed(account)

    def _mixed(self, laid: Candidate) -> Candidate | None:
        """The same layouts, with the regions recomputed that make them fit at least cost."""
        regions = self.regions
        ways = {kind: laid.recomputed(regions.all(kind)) for kind in KINDS}
        graphs = {kind: way.rewritten for kind, way in ways.items()}
        problem = mixed_problem(graphs, regions.free, laid.prices)
        plain = ways[PLAIN].memory
        room = self.memory - (plain.peak - plain.activations)
        for _ in range(ATTEMPTS):
            kinds = problem.solve(room)
            if kinds is None:
                return None
            decided = regions.fixed | {n: how for n, how in kinds.items() if not how.is_plain}
            mixed = laid.recomputed(decided)
            if mixed.memory.peak <= self.memory:
                return mixed
            room -= mixed.memory.peak - self.memory
        return None

    def _layout_request(self, stages: int, parts: int) -> LayoutRequest:
        """The fastest layouts, whatever they need."""
        is_straight = stages == 1 and self.request.schedule is None
        batches = None if is_straight and parts == 1 else self._batches(parts)
        program = self.captured if batches is None else batches.captured
        offered = self.request.meshes(stages)
        plain = self.regions.all(self.regions.kinds[0])
        return LayoutRequest(program, batches, offered, math.inf, is_straight, recompute=plain)

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
        ways = cache(lambda kind: laid.recomputed(self.regions.all(kind)))
        lines = cache(lambda kind: ways(kind).stage_costs(mesh, axis))
        fastest = cache(lambda count, kind: choose_stages(lines(kind), count, pins=pins))

        def piped(made: Schedule, stages: Sequence[StageCost], kind: Recompute) -> Candidate:
            pipelining = Pipelining(axis, mesh, made, tuple(stages))
            search = laid.search and laid.search.shared(made.ranks)
            return ways(kind).changed(search, pipelining)

        kinds = (*self.regions.kinds, *self.regions.leaner(asked.cluster.device.host))
        for made in asked.schedules(stages, parts):
            least = 0.0  # bytes besides activations
            for kind in kinds:
                if kind not in self.regions.kinds and least > self.memory:
                    break
                try:
                    way = piped(made, fastest(made.stages, kind), kind)
                except InvalidInput:
                    # Schedules with several chunks want more stages than others: only they fail.
                    if made.stages == stages or made is asked.schedule:
                        raise
                    break
                is_tight = way.memory.peak > self.memory and way.seconds < self._fastest
                self._is_bound |= is_tight
                if is_tight:
                    kept, room = peaks(made, not kind.is_plain), self.memory
                    with suppress(InvalidInput):
                        cut = choose_stages(
                            lines(kind), made.stages, pins=pins, memory=room, peaks=kept
                        )
                        way = piped(made, cut, kind)
                yield way
                if not is_tight:
                    break
                least = way.memory.peak - way.memory.activations
