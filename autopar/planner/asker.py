"""Answers to questions: layouts are searched for, stages are cut, and the way is priced.

    asker = Asker(model, captured, request, report)
    asker.program                     # to ask about: short, if equal blocks stand for many
    asker.ask(question, cutoff=1.5)   # Found, TooLarge, TooSlow, OutOfTime, Refused or Unlike

An answer depends on its question alone and is kept. `cutoff` spares work: a way that is sure to
take so many seconds is answered by that bound. Questions with equal layouts share their search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import nn

from autopar.candidates.alternative import Alternative
from autopar.candidates.axis_roles import axis_roles, with_names
from autopar.candidates.candidate import Candidate
from autopar.candidates.mixed_problem import members_of
from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.candidates.stage_mixes import MixedWay, StageMixes
from autopar.candidates.staged import KnownLines, StagedProgram, StagedWay
from autopar.candidates.whole import Whole
from autopar.capture.annotations import marked_regions, parameter_annotations, stage_pins
from autopar.capture.captured import Captured
from autopar.capture.folding import fold
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import cut_batch
from autopar.passes.token_cutter import require_slices
from autopar.pipeline.schedule import Schedule
from autopar.planner.bounds import Bounds
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.mixed import mixed
from autopar.planner.question import (
    Answer,
    Found,
    OutOfTime,
    Question,
    Refused,
    TooLarge,
    TooSlow,
    Unlike,
)
from autopar.planner.schedule_lists import listed
from autopar.recompute import FULL, Recompute, summary
from autopar.search import layout_search
from autopar.search.constraints import Constraints, read_constraints, require_used
from autopar.search.layout_search import NothingFaster
from autopar.search.smallest_footprint import NothingFits
from autopar.states import WHOLE
from autopar.text.progress import Report

_SLOWER = 0.02  # relative: what a mix may take more that takes the place of a refused one
_LISTED = 2.0  # times the best: what takes no longer is listed beside it
HUGE = 2000  # calls of a program of which a way that is too slow gets no program of its own


@dataclass(frozen=True)
class _Outline:
    """A stand-in for the real program of a mix."""

    candidate: Candidate
    mixes: StageMixes
    way: MixedWay


class Asker:
    """Answers the questions about one model and request."""

    def __init__(
        self, model: nn.Module, captured: Captured, request: Request, report: Report
    ) -> None:
        require_used(model, captured, request.mode, request.stages)
        self._request, self._report = request, report  # no model: who asks may outlive it
        self._annotations, self._pins = parameter_annotations(model), stage_pins(model)
        self._marked = marked_regions(model)
        self.whole_program = captured
        self.program = self._short(captured)
        self.whole: Whole | None = None
        if self.program.is_folded:
            self.whole = Whole(self.program, request)
        self.is_huge = captured.length > HUGE
        self.was_interrupted = False  # some search for layouts ended with its best so far
        self._askers = cache(self._program_asker)
        self._answers: dict[Question, Answer] = {}
        self._outlines: dict[int, _Outline] = {}  # by identity of the stand-ins
        self.bounds = Bounds(self.program, request, self.regions)

    @property
    def regions(self) -> Regions:
        """Return the regions of the program that is asked about first."""
        return self._askers(self.program).regions

    @property
    def least_stages(self) -> int:
        """Return the fewest stages that annotations allow."""
        return 2 if any(pin.stage > 0 for pin in self._pins) else 1

    def ask(self, question: Question, cutoff: float = math.inf) -> Answer:
        """Answer a question; with a bound, if every way takes `cutoff` seconds at least."""
        known = self._answers.get(question, OutOfTime())
        is_open = isinstance(known, OutOfTime)
        if is_open or (isinstance(known, TooSlow) and known.bound < cutoff):
            known = self._answers[question] = self._answered(question, cutoff)
        return known

    def _answered(self, question: Question, cutoff: float) -> Answer:
        program_asker = self._askers(question.program)
        try:
            return program_asker.answer(question, cutoff)
        except NothingFits as error:
            smallest = error.smallest.in_stages(question.stages)
            return TooLarge(smallest.memory, smallest=smallest)
        except NothingFaster:
            # Layouts of a mix are searched with everything recomputed: no cutoff there is a bound.
            is_proved = not (question.is_mixed and question.has_own_layouts)
            return TooSlow(cutoff if is_proved else self.bounds.seconds(question))
        except layout_search.DeadlinePassed:
            return OutOfTime()
        except InvalidInput as error:
            return Refused(error.with_traceback(None))

    def figures(self, candidate: Candidate) -> Alternative:
        """Return the figures of a way, with all regions of the whole program that run again."""
        figures = candidate.alternative(self._request.memory)
        if self._request.mesh is None:
            figures = replace(figures, mesh=figures.mesh.renamed(axis_roles(candidate)))
        if (outline := self._outlines.get(id(candidate))) is not None:
            return replace(figures, recompute=summary(outline.way.decided))
        return figures if self.whole is None else self.whole.with_all_regions(figures, candidate)

    def finished(self, candidate: Candidate) -> Candidate | None:
        """Return a way with axes that are named by what they do, and the real program of a mix.
        None: that does not take what is predicted."""
        names = {} if self._request.mesh is not None else axis_roles(candidate)
        if (outline := self._outlines.get(id(candidate))) is not None:
            cutoff = candidate.seconds * (1 + _SLOWER)
            mixed = outline.mixes.real(outline.way, self._request.memory, cutoff)
            return mixed and with_names(mixed, names)
        return with_names(candidate, names)

    def outline(self, mixes: StageMixes, way: MixedWay) -> Candidate:
        """Return a stand-in for the real program of a mix, which is made when it is finished."""
        candidate = mixes.outline(way)
        self._outlines[id(candidate)] = _Outline(candidate, mixes, way)
        return candidate

    def constraints(
        self, program: Captured, decided: Mapping[str, Recompute], mesh: Mesh
    ) -> Constraints:
        """Return what annotations ask for, where these regions are recomputed."""
        if self._request.mode == "data":
            return Constraints(recompute=decided)
        return replace(read_constraints(program, mesh, self._annotations), recompute=decided)

    def _short(self, captured: Captured) -> Captured:
        """Return the folded program, if no single modules are annotated or chosen, no tokens are
        sliced, and each region is in one block."""
        request = self._request
        is_annotated = any(self._annotations) or any(self._pins) or any(self._marked)
        if request.mode != "auto" or is_annotated or request.is_sliced or request.recompute.modules:
            return captured
        short = fold(captured)
        free = Regions(short, request.recompute).free if short.is_folded else ()
        return captured if members_of(short, free) is None else short

    def _program_asker(self, program: Captured) -> _ProgramAsker:
        whole = self.whole if program is self.program else None
        regions = Regions(program, self._request.recompute, self._marked)
        layouts = Layouts(self._request, self.constraints, self._report, whole)
        return _ProgramAsker(self, program, regions, layouts, whole)


class _ProgramAsker:
    """Answers the questions about one program: the whole, or a short one that stands for it."""

    def __init__(
        self,
        asker: Asker,
        program: Captured,
        regions: Regions,
        layouts: Layouts,
        whole: Whole | None,
    ) -> None:
        self._asker, self.program, self.regions = asker, program, regions
        self._request, self._memory = asker._request, asker._request.memory
        self._layouts, self._whole = layouts, whole
        self._batches = cache(partial(cut_batch, program))
        self._known_lines: dict[int, KnownLines] = {}  # what is known of layouts, with any states
        self._staged: dict[tuple[object, ...], StagedProgram] = {}
        self._mixes = cache(partial(StageMixes, whole=whole))

    def answer(self, question: Question, cutoff: float) -> Answer:
        """Answer a question, or raise what layouts, stages and batches raise."""
        laid = self._laid_out(question, cutoff)
        if question.schedule is not None:
            if laid.captured.is_folded and not laid.step.program.is_regular:
                return Unlike()
            schedule = listed(question.schedule, question.stages, question.microbatches)
            require_slices(laid.captured, schedule.slices)
            return self._in_stages(question, laid, schedule, cutoff)
        if question.is_mixed:
            return mixed(
                laid, self.regions, self._memory, self._whole, cutoff, self._layouts.report
            )
        decided = self.regions.all(self._kind(question))
        way = laid.recomputed(decided)
        return self._judge(way.changed(way.search and way.search.taken(way.seconds)), cutoff)

    def _judge(self, way: Candidate, cutoff: float) -> Answer:
        if self._is_too_slow(way.seconds, cutoff):
            return TooSlow(way.seconds)
        if way.fits(self._memory):
            return Found(way)
        return TooLarge(way.needed(self._memory), way)

    def _is_too_slow(self, seconds: float, cutoff: float) -> bool:
        """Return whether a way is too slow to be priced in full, only to be listed."""
        return seconds >= cutoff * (1 if self._asker.is_huge else _LISTED)

    def _kind(self, question: Question) -> Recompute:
        kind = question.recompute
        return kind if isinstance(kind, Recompute) else self.regions.kinds[0]

    def _laid_out(self, question: Question, cutoff: float) -> Candidate:
        """Return the program with its layouts; only the regions run again that must."""
        request = self.layout_request(question, cutoff)
        laid, _ = self._layouts.find(request)
        self._asker.was_interrupted |= laid.search is not None and laid.search.interrupted
        is_plain = request.recompute == self.regions.all(self.regions.kinds[0])
        is_first = is_plain and (request.states.is_whole or self._request.states is not None)
        if laid.search and not laid.search.interrupted and is_first and request.memory == math.inf:
            self._asker.bounds.note(question, laid.search.bound / question.stages)
        placed = laid.placed(question.states)
        is_cut = placed is laid or question.states.is_whole or bool(placed.decisions.apart)
        if not is_cut:
            raise InvalidInput(
                "states are cut over ranks that hold replicas of parameters",
                got=f"{question.states} on {laid.mesh}, where no gradient is summed over ranks",
                remedy='states="whole"',
            )
        return placed

    def layout_request(self, question: Question, cutoff: float = math.inf) -> LayoutRequest:
        """Return the request for the layouts of a question."""
        is_straight = question.schedule is None
        parts = question.microbatches
        batches = None if is_straight and parts == 1 else self._batches(parts)
        has_own = question.has_own_layouts
        kind = self.regions.kinds[0]
        if has_own:
            kind = question.recompute if isinstance(question.recompute, Recompute) else FULL
        return LayoutRequest(
            captured=self.program if batches is None else batches.captured,
            batches=batches,
            offered=question.meshes,
            memory=question.memory,
            is_unstaged=is_straight and not question.is_as_added_up,
            states=question.states if has_own else WHOLE,
            recompute=self.regions.all(kind),
            cutoff=cutoff * question.stages,
            line=None if is_straight else self._request.line(question.stages),
        )

    def _in_stages(
        self, question: Question, laid: Candidate, schedule: Schedule, cutoff: float
    ) -> Answer:
        """Answer by the fastest stages; if these are too large, by stages that share out memory."""
        program = self._program_in_stages(laid, question)
        kinds = self.regions.staged if question.is_mixed else (self._kind(question),)
        answer = self._in_uniform_stages(program, schedule, kinds[0], cutoff)
        if len(kinds) == 1 or not isinstance(answer, TooLarge):
            return answer
        mixed_answer = self._mixed_in_stages(program, schedule, cutoff)
        least_seconds = mixed_answer.bound if isinstance(mixed_answer, TooSlow) else math.inf
        least_seconds = mixed_answer.seconds if isinstance(mixed_answer, Found) else least_seconds
        for kind in kinds[1:]:
            if program.fastest(schedule, kind).seconds < least_seconds:
                answer = self._in_uniform_stages(
                    program, schedule, kind, cutoff, is_cut=mixed_answer is None
                )
                if not isinstance(answer, TooLarge):
                    return answer
        return mixed_answer or answer

    def _in_uniform_stages(
        self,
        program: StagedProgram,
        schedule: Schedule,
        kind: Recompute,
        cutoff: float,
        *,
        is_cut: bool = True,
    ) -> Answer:
        """Answer by stages that treat all regions alike; `is_cut`: by leaner ones, if need be."""
        answer = self._judge_stages(program.fastest(schedule, kind), cutoff)
        if is_cut and isinstance(answer, TooLarge) and self._is_worth_cutting(schedule, answer):
            way = program.within(schedule, kind, self._memory)
            if way is not None:
                return self._judge_stages(way, cutoff)
        return answer

    def _mixed_in_stages(
        self, program: StagedProgram, schedule: Schedule, cutoff: float
    ) -> Found | TooSlow | None:
        """Answer by stages that recompute as much as each has to. None: none are known to fit."""
        mixes = self._mixes(program)
        way = mixes.fastest(schedule, self._memory, cutoff)
        if way is None:
            return None
        if way.seconds >= cutoff:
            return TooSlow(way.seconds)
        if program.laid.captured.is_folded:
            return Found(self._asker.outline(mixes, way))
        real = mixes.real(way, self._memory, cutoff)
        return None if real is None else Found(real)

    def _judge_stages(self, way: StagedWay, cutoff: float) -> Answer:
        if self._is_too_slow(way.seconds, cutoff):
            return TooSlow(way.seconds)
        if self._asker.is_huge and max(way.spread, way.least) > self._memory:
            return TooLarge(max(way.spread, way.least), way)
        return self._judge(way.candidate, cutoff)

    def _is_worth_cutting(self, schedule: Schedule, answer: TooLarge) -> bool:
        """Return whether to look for stages that fit: those of large programs that share their
        ranks take seconds."""
        is_simple = schedule.pipes == schedule.chunks == 1 or self._request.schedule is not None
        if self._asker.is_huge and not is_simple:
            return False
        return not (isinstance(answer.way, StagedWay) and answer.way.spread > self._memory)

    def _program_in_stages(self, laid: Candidate, question: Question) -> StagedProgram:
        strategies = laid.decisions.strategies
        known = self._known_lines.setdefault(id(strategies), KnownLines(strategies))
        key = id(strategies), question.states, question.stages
        if key not in self._staged:
            regions = self.regions
            if self._whole is not None and not laid.captured.is_folded:
                regions = self._whole.regions
            self._staged[key] = StagedProgram(
                laid, question.stages, self._request, regions, self._asker._pins, known
            )
        return self._staged[key]
