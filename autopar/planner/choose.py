"""Choose: how many stages, which layouts inside them, how many micro-batches, which schedule.

Every candidate has the layouts that the search finds for its own mesh and micro-batch, is cut into
stages by predicted seconds, and priced by simulating its schedule; where memory is short, with some
regions recomputed, or cut so that every rank keeps within it. The fastest that fits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from torch import nn

from autopar.base.garbage_collection import frozen_objects
from autopar.candidates.candidate import Candidate
from autopar.capture.annotations import marked_regions, parameter_annotations, stage_pins
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks
from autopar.errors import Interrupted, InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.stages.stretch import NotAlike
from autopar.planner.again import Again
from autopar.planner.bounds import lowered, saved_by_states
from autopar.planner.hosting import may_go
from autopar.planner.ideal import Ideal
from autopar.planner.layouts import LESS, LayoutRequest, Layouts
from autopar.planner.leanest import in_each_number_of_stages, leanest
from autopar.planner.ledger import Ledger
from autopar.planner.mixed import ATTEMPTS
from autopar.planner.patience import Ended
from autopar.planner.pipelines import Pipelines
from autopar.planner.promises import Promises, Size, size_of
from autopar.planner.recomputation import AskedRecomputation, Regions
from autopar.planner.request import Request
from autopar.planner.room import Room
from autopar.planner.telling import Telling, size_words
from autopar.planner.verdict import no_size
from autopar.planner.whole import Whole
from autopar.recompute import Recompute
from autopar.search.constraints import Constraints, read_constraints
from autopar.search.layout_search import NothingFaster, OutOfTime, is_large, nothing_found_yet
from autopar.search.search_report import SearchReport
from autopar.search.smallest_footprint import NothingFits
from autopar.solver.cost_graph import UnequalBlocks
from autopar.states import States
from autopar.text.progress import Report

HUGE = 2000  # calls of a program that is not looked at where it cannot be the best
MOST_LEANEST = 3  # numbers of stages in which the leanest way of a huge program is looked for


class Planner:
    """Makes and prices the candidates of a request; what they share is made once."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        request: Request,
        report: Report,
        whole: Whole | None = None,
    ) -> None:
        """`whole`: of a program that stands for a longer one."""
        self.captured, self.request, self.memory = captured, request, request.memory
        marked = marked_regions(model)
        self.regions = Regions(captured, request.recompute, marked)
        every = Regions(captured, AskedRecomputation(), marked)
        self.ideal = Ideal(captured, request, Room(captured, request, self.regions))
        count = len(blocks(captured if whole is None else whole.short.whole))
        self._promises = Promises(captured, request, self.ideal, count)
        self._annotations, pins = parameter_annotations(model), stage_pins(model)
        self._least_stages = 2 if any(pin.stage > 0 for pin in pins) else 1
        self._batches = cache(partial(cut_batch, captured))
        self.ledger = Ledger(request)
        self.report = Telling(report, self.ledger)
        self._hosted = request.hosted if may_go(model, request.states) else ()
        self._layouts = Layouts(request, self.constraints, self.report, whole)
        self._whole, self._is_huge = whole, captured.length > HUGE
        held = self._layouts, self.regions, every, whole, self.memory, self.ledger
        self._again = Again(*held, is_many=not self._is_huge)
        about = self.ledger, self._promises, self.ideal
        regions_of = self._again.regions_of
        self._pipelines = Pipelines(request, count, regions_of, pins, about, self._is_huge)
        self._short_of_memory: list[Size] = []  # sizes of which something faster did not fit
        self.ended: Ended = ""  # early: the best so far is taken
        self._left: list[Size] = []  # then, also what was only guessed not to be faster

    @property
    def _fastest(self) -> float:
        """The seconds that a way has to beat."""
        return self.ledger.fastest

    @frozen_objects()
    def best(self) -> Candidate:
        """The fastest way to run a step, of those that are asked for and fit."""
        reasons: dict[str, InvalidInput] = {}  # by size
        sizes = [size for size in self.request.sizes() if size[0] >= self._least_stages]
        needs_host, tried = self._promises.needs_host and bool(self._hosted), 0
        left = [Size(*size, needs_host) for size in sizes]
        while left and not self.ended:
            left.sort(key=self._promises.of)
            if is_large(self.captured) and not (left := self._likely(left)):
                break
            left.insert(0, left.pop(self._promises.next(left, self._fastest < math.inf, tried)))
            stages, parts, is_hosted = left[0]
            if not self._may_win(left[0]):
                self.ledger.left_out["sizes"] += not is_hosted  # each once
                left = left[1:]
                continue
            try:
                self.report.look_at(size := size_words(stages, parts))
                if self._looks_ahead(stages, parts):
                    continue  # others may promise more now
                tried += 1
                ways = self._on_host if is_hosted else self._candidates
                for candidate in ways(stages, parts):
                    self._weigh(candidate)
            except OutOfTime:
                self.ended = "time"
            except (KeyboardInterrupt, Interrupted):
                self.ended = "Ctrl-C"
            except NothingFaster:
                pass
            except NothingFits as error:
                self.ledger.refuse([error.smallest], stages)
            except UnequalBlocks:
                self.ledger.left_out["unlike"] += 1
            except InvalidInput as error:
                is_straight = all(n == 1 for n, _ in sizes)
                if len(sizes) == 1 or (is_straight and parts == 1):
                    raise
                reasons[size] = error.with_traceback(None)
            if self.ended:
                break
            may_move = (
                self._hosted and not is_hosted and Size(stages, parts) in self._short_of_memory
            )
            left[:1] = [Size(stages, parts, is_hosted=True)] if may_move else []
        self._left += left
        if not self.ended:
            self.ended = self._weigh_all(self._further())
        if self.ledger.kept.best is None and self.ended != "Ctrl-C":
            if self.ledger.left_out["unlike"]:
                raise NotAlike
            if self.ledger.is_beside and not self.ledger.refused:
                raise NothingFaster
            self.ended = self._weigh_all(self._leanest_of(sizes))
        if (best := self.ledger.kept.best) is None:
            if self.ended == "Ctrl-C":
                raise nothing_found_yet()
            raise self.ledger.refusal(self.regions, self.captured) or no_size(reasons, self.request)
        return self._finished(best)

    def _likely(self, left: Sequence[Size]) -> list[Size]:
        """Those of the sizes that are left which may well be faster than what fits already."""
        found = [size for size in left if self._promises.likely(size, self._fastest)]
        for size in (size for size in left if size not in found):
            is_sure = self._promises.known_least(size.stages, size.parts) >= self._fastest
            self.ledger.left_out["sizes" if is_sure else "unlikely"] += not size.is_hosted
            self._left += [] if is_sure else [size]
        return found

    def _may_win(self, size: Size) -> bool:
        """Whether some way of that size may be faster than what fits."""
        stages, parts, is_hosted = size
        fastest = self._fastest - self._promises.update * is_hosted
        if fastest == math.inf:
            return True
        if (least := self._promises.known_least(stages, parts)) >= fastest:
            return False
        made = None if self._is_straight(stages) else self._pipelines.schedules(stages, parts)
        return self.ideal.may_win(stages, parts, made, fastest, least, is_hosted)

    def constraints(
        self, program: Captured, decided: Mapping[str, Recompute], mesh: Mesh
    ) -> Constraints:
        """What annotations ask for, where these regions are recomputed."""
        if self.request.mode == "data":
            return Constraints(recompute=decided)
        return replace(read_constraints(program, mesh, self._annotations), recompute=decided)

    def _weigh(self, candidate: Candidate) -> None:
        figures = candidate.alternative(self.memory)
        figures = figures if self._whole is None else self._whole.told(figures, candidate)
        self.ledger.add(figures, candidate, self._finished)
        self.ledger.go_on()
        if candidate.search is not None and candidate.search.interrupted:
            self.ended = "Ctrl-C"

    def _finished(self, best: Candidate) -> Candidate:
        """Of the whole program, with what is known of the least that a step takes."""
        best = best if self._whole is None else self._whole.same(best)
        if (search := best.search) is None:
            return best
        if best.pipelining is None:  # of what runs again the search adds up some alone
            search = search.taken(best.seconds)
            best = best.changed(search)
        if self.ended:
            own = size_of(best)
            saved = saved_by_states(self._layout_request(*own[:2]), self.request)
            bound = self._promises.least_of_all(own, search.bound, saved, self._left)
            return best.changed(search.cut_short(bound))
        return best.changed(self._lowered(best, search))

    def _lowered(self, best: Candidate, search: SearchReport) -> SearchReport:
        """With a bound for all cut states, if the search chose these."""
        asked, least = self._layout_request(*size_of(best)[:2]), self._promises.least_run
        return lowered(search, best.states, asked, self._layouts, self._is_huge, least)

    def _weigh_all(self, ways: Iterator[Candidate]) -> Ended:
        """What ended it early, if that did."""
        try:
            for way in ways:
                self._weigh(way)
        except OutOfTime:
            return "time"
        except (KeyboardInterrupt, Interrupted):
            return "Ctrl-C"
        return self.ended

    def _leanest_of(self, sizes: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
        """What takes least is told of, or fits though nothing else does."""
        self.ledger.is_last = True
        self.report("memory", "the least that is needed")
        most = MOST_LEANEST if self._is_huge else len(sizes)
        for way in in_each_number_of_stages(sizes, most, self._leanest):
            yield way.changed(way.search and way.search.lowered(0.0))

    def _looks_ahead(self, stages: int, parts: int) -> bool:
        """Look for the fastest layouts of a size; whether they were not known."""
        known = self._promises.known
        if (stages, parts) in known or self.request.mode != "auto":
            return False
        asked = replace(self._layout_request(stages, parts), cutoff=self._fastest * stages)
        try:
            free, _ = self._layouts.find(asked)
        except NothingFaster:
            known[stages, parts] = self._fastest
            raise
        known[stages, parts] = 0.0 if free.search is None else free.search.bound / stages
        return free.search is None or not free.search.interrupted

    def _candidates(self, stages: int, parts: int) -> Iterator[Candidate]:
        """Every way with this many stages and micro-batches. The fastest layouts come first: no way
        takes less time than these without bubbles. Where memory binds, the same with states that
        are cut, and with regions that are recomputed for each schedule; then layouts that leave
        more room, as long as they may be faster than what fits already. Without a pipeline, states
        go to the host before that search, and regions are recomputed after it."""
        _, *others = settings = self.request.settings(stages)
        asked = replace(self._layout_request(stages, parts), cutoff=self._fastest * stages)
        free, _ = self._layouts.find(asked)
        refused: list[NothingFits] = []
        found: list[bool] = []  # of each candidate, whether it fits, with nothing on the host

        def weighed(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
            try:
                for candidate in candidates:
                    is_there = candidate.decisions.keeps_on_host or candidate.states in self._hosted
                    found.append(candidate.fits(self.memory) and not is_there)
                    yield candidate
            except NothingFits as error:
                refused.append(error)
            except NothingFaster:
                pass

        self.ledger.is_bound = is_crowded = self._promises.is_crowded(stages, parts)
        if not (is_crowded and asked.is_all):
            yield from weighed(self._laid(free, stages, parts))
            if not self.ledger.is_bound or self.ended:
                return
            yield from weighed(self._placed(free, stages, parts, others))
            yield from weighed(self._on_whole_states(asked, stages, parts))
            yield from weighed(self._placed(free, stages, parts, settings, is_leaner=True))
            if asked.is_all and self._may_be_hosted(free):
                yield from weighed(self._moved_to_host(free))  # which takes no search
        if self.request.mode == "auto" and not is_crowded:
            yield from weighed(self._with_states(asked, stages, parts))
            for states in others:
                if any(found) or self.ledger.fits_device or self.ended:
                    break
                yield from weighed(self._with_states(replace(asked, states=states), stages, parts))
        may_choose = len(self.regions.kinds) > 1
        if not self.ended and asked.is_all and may_choose:
            yield from weighed(self._again.ways(free, asked, settings))
        elif not (self.ended or any(found) or self.ledger.fits_itself) and may_choose:
            lean = self.regions.all(self.regions.kinds[-1])
            leaner = replace(asked, states=settings[-1], recompute=lean)
            yield from weighed(self._with_states(leaner, stages, parts))
        self._short_of_memory.append(Size(stages, parts))
        self.ledger.refuse([error.smallest for error in refused], stages)

    def _on_whole_states(
        self, asked: LayoutRequest, stages: int, parts: int
    ) -> Iterator[Candidate]:
        """Every way with states that were asked for and the layouts that are best with whole ones,
        which may be cut more."""
        named = self.request.states
        if named and named.is_cut and named.keeps_mesh and self._is_searched:
            yield from self._placed(self._layouts.with_whole_states(asked), stages, parts, [named])

    def _further(self) -> Iterator[Candidate]:
        """Ways with other layouts that may fit and be faster than what does, of the sizes that are
        short of memory. Nothing that is known of the least depends on them."""
        if not self._is_searched:
            return
        if (best := self.ledger.kept.best) and best.search:
            self._lowered(best, best.search)  # its bound is known before time is over
        straight = [size for size in self._short_of_memory if self._is_straight(size.stages)]
        for stages, parts, _ in sorted(straight, key=self._promises.of):
            if self._may_win(Size(stages, parts)) and not self._promises.is_crowded(stages, parts):
                asked = replace(self._layout_request(stages, parts), cutoff=self._fastest)
                with suppress(NothingFaster, NotAlike, InvalidInput):  # others may fit
                    free, _ = self._layouts.find(asked)
                    on_host = self._hosted if self._may_be_hosted(free) else ()
                    settings = self.request.settings(stages), on_host
                    yield from self._again.further(free, asked, *settings)
        if (best := self.ledger.kept.best) and best.pipelining is None:
            yield from self._again.last(best, self._layout_request(1, best.microbatches), straight)

    def _may_be_hosted(self, free: Candidate, stages: int = 1) -> bool:
        """Whether layouts may be faster than what fits if hosts update what is learned."""
        return free.seconds / stages + self._promises.update < self._fastest

    def _on_host(self, stages: int, parts: int) -> Iterator[Candidate]:
        """Ways with states on the host, as long as they may be faster than what fits already: those
        of stages as they are, then with recomputation, then with layouts of their own."""
        asked = replace(self._layout_request(stages, parts), cutoff=self._fastest * stages)
        free, _ = self._layouts.find(asked)
        if not self._may_be_hosted(free, stages):
            return
        self._short_of_memory += [Size(stages, parts)] if self._promises.needs_host else []
        self.report("memory", "states on the host")
        if not asked.is_all:
            yield from self._placed(free, stages, parts, self._hosted)
            yield from self._placed(free, stages, parts, self._hosted, is_leaner=True)
        elif self._promises.is_crowded(stages, parts):
            yield from self._moved_to_host(free)
        for states in self._hosted if asked.is_all and len(self.regions.kinds) > 1 else ():
            source = free.placed(states)
            may_win = not source.fits(self.memory) and source.seconds < self._fastest
            if may_win and (way := self._again.mixed(source)) is not None:
                yield way.changed(way.search and way.search.taken(way.cost.seconds))
        is_open = self.request.mode == "auto" and not self._promises.is_crowded(stages, parts)
        is_open &= not self._is_huge or not self.ledger.fits_device
        for states in self._hosted if is_open else ():
            yield from self._with_states(replace(asked, states=states), stages, parts)

    def _moved_to_host(self, free: Candidate) -> Iterator[Candidate]:
        """A program without stages, and its layouts, with states on the host."""
        self.report("memory", "states on the host")
        if free.held.activations <= self.memory:
            yield from self._placed(free, 1, free.microbatches, self._hosted)

    def _leanest(self, stages: int, parts: int) -> Iterator[Candidate]:
        """The ways that take least with so many stages and micro-batches."""
        kinds = (*self.regions.staged[::-1], *self.regions.leaner(self.request.cluster.device.host))
        schedules = () if self._is_straight(stages) else self._pipelines.schedules(stages, parts)
        asked = self._layout_request(stages, parts)
        about = partial(self._pipelines.staged, stages=stages)
        settings = [*self.request.settings(stages), *self._hosted]
        # States that are cut are gathered: layouts that cut them themselves may take less.
        for states in dict.fromkeys((settings[-1], settings[0])):
            with_states = replace(asked, states=states)
            yield from leanest(with_states, self._layouts, self.regions, kinds, schedules, about)

    @property
    def _is_searched(self) -> bool:
        """Whether layouts are, and many of them are looked at."""
        return self.request.mode == "auto" and not self._is_huge

    def _is_straight(self, stages: int) -> bool:
        """Whether devices hold no more than one program."""
        return stages == 1 and self.request.schedule is None

    def _layout_request(self, stages: int, parts: int) -> LayoutRequest:
        """The fastest layouts, whatever they need, with the states that are tried first."""
        is_straight = self._is_straight(stages)
        batches = None if is_straight and parts == 1 else self._batches(parts)
        program = self.captured if batches is None else batches.captured
        line = None if is_straight else self.request.line(stages)
        about = program, batches, self.request.meshes(stages, parts), math.inf, is_straight
        states, decided = self.request.settings(stages)[0], self.regions.all(self.regions.kinds[0])
        return LayoutRequest(*about, states, recompute=decided, line=line)

    def _laid(
        self, laid: Candidate, stages: int, parts: int, is_leaner: bool = False
    ) -> Iterator[Candidate]:
        """Every way with these layouts and states."""
        if self._is_straight(stages):
            self.ledger.is_bound |= not laid.fits(self.memory)
            yield laid
        else:
            yield from self._pipelines.ways(laid, stages, parts, is_leaner)

    def _placed(
        self,
        whole: Candidate,
        stages: int,
        parts: int,
        settings: Sequence[States],
        is_leaner: bool = False,
    ) -> Iterator[Candidate]:
        """Every way with the layouts of one, and one of some settings of states."""
        for states in () if is_leaner and self._is_straight(stages) else settings:
            laid = whole.placed(states)
            if self.ended or not (laid.decisions.apart or states == whole.states):
                return
            if self._is_straight(stages):
                laid = laid.changed(whole.search and whole.search.taken(laid.cost.seconds))
            yield from self._laid(laid, stages, parts, is_leaner)

    def _with_states(self, asked: LayoutRequest, stages: int, parts: int) -> Iterator[Candidate]:
        """Every way with one setting of states, and the fastest layouts that leave it room."""
        # Each stage has a share of the states, and at least the activations of one micro-batch.
        limit = least = self.request.room(stages)
        impossible = 0.0  # bytes that no layouts fit in
        for attempt in range(ATTEMPTS):
            try:
                cutoff = self._fastest * stages
                laid, needed = self._layouts.find(replace(asked, memory=limit, cutoff=cutoff))
            except NothingFaster:
                return
            except NothingFits as error:
                if not attempt:
                    self.ledger.refuse([error.smallest], stages)
                    return
                impossible, limit = limit, (limit + least) / 2
                continue
            search = laid.search
            if asked.is_all:
                yield laid
                return
            # A pipeline without bubbles gives every stage its part of the work.
            if search is not None and search.objective / stages >= self._fastest:
                return
            if not self._pipelines.has_tried(laid):
                yield from self._pipelines.ways(laid, stages, parts)
                yield from self._pipelines.ways(laid, stages, parts, is_leaner=True)
            taken = self._pipelines.tried(laid).memory
            if taken <= self.memory or taken == math.inf or search is None:
                return
            # Stages are uneven, and keep several micro-batches: leaner layouts may leave room.
            asked = replace(asked, offered=[laid.mesh])
            least = min(limit, needed)
            limit = max(LESS * least * self.memory / taken, (impossible + least) / 2)
