"""The loop over questions: it asks, the most promising first, and takes the best answer.

    planner = Planner(model, captured, request, report)
    planner.best()                 # the best candidates, or the refusal that says what is missing
    planner.record.asked           # every question with its answer, in order

The queue starts with the templates. Each answer corrects the estimates of what is still in it, and
adds the questions that follow by a rule. A question whose lower bound is no better than the best so
far is never asked. Here the time ends the search, and Ctrl-C is caught.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from autopar.base.garbage_collection import frozen_objects
from autopar.candidates.alternative import Alternative, best_first
from autopar.candidates.candidate import Candidate
from autopar.candidates.patience import Ended, Patience
from autopar.candidates.request import Request
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks
from autopar.errors import Interrupted, InvalidInput
from autopar.mesh import Mesh
from autopar.planner.asker import Asker
from autopar.planner.estimates import Estimates
from autopar.planner.hosting import may_go
from autopar.planner.question import Found, OutOfTime, Question, Refused, TooLarge
from autopar.planner.record import AnswerCosts, Record, handicap
from autopar.planner.refusals import refusal
from autopar.planner.rules import (
    MINIMUM,
    RULES,
    TEMPLATE,
    FollowUp,
    SearchEntry,
    minimum_memory,
)
from autopar.planner.schedule_lists import listed
from autopar.planner.templates import Templates
from autopar.recompute import Recompute
from autopar.search import layout_search
from autopar.search.constraints import Constraints
from autopar.search.layout_search import is_large, nothing_found_yet
from autopar.text.progress import Report
from autopar.text.units import seconds_text

_DEARER = 1.08  # an answer about a pipeline takes as long as several others


class Planner:
    """Finds the best way to run a step of one program on the machines of one request."""

    def __init__(
        self, model: nn.Module, captured: Captured, request: Request, report: Report
    ) -> None:
        self.request, self._report = request, report
        self._asker = Asker(model, captured, request, self._report_or_stop)
        self.whole_program = captured
        self.hosted = request.hosted if may_go(model, request.states) else ()
        program, regions = self._asker.program, self._asker.regions
        count = len(blocks(captured))
        self.templates = Templates(program, request, regions, count)
        self._bounds = self._asker.bounds
        self._estimates = Estimates(program, request, self._bounds, count)
        self.record, self._patience = Record(), request.patience
        self.ended: Ended = ""
        self._costs = AnswerCosts()
        self._queue: dict[Question, FollowUp] = {}  # with the rule that asks
        self._seen: dict[Question, None] = {}

    def prepare(self) -> None:
        """Add the templates to the queue, once."""
        if not self._seen:
            is_large_program, least_stages = is_large(self._asker.program), self._asker.least_stages
            first = self.templates.first(self._estimates, least_stages, is_large=is_large_program)
            self._add(first, TEMPLATE)

    @property
    def promise(self) -> float:
        """Return the least seconds that a question in the queue promises."""
        self.prepare()
        return min(map(self._order, self._queue), default=math.inf)

    @frozen_objects()
    def best(
        self, wanted: int = 1, fastest: float = math.inf, patience: Patience | None = None
    ) -> list[Candidate]:
        """Return the best ways to run a step that differ, at most so many; refuse if none fits.
        `fastest`: seconds that are to be beaten; if nothing does, none are returned."""
        self.record.to_beat, self.record.wanted = fastest, wanted
        self._patience = patience or self.request.patience
        self.prepare()
        best: list[Candidate] = []
        try:
            self._ask_all()
            if not self.record.has_some and not self._is_refused:
                self._add(minimum_memory([*self._seen], self), MINIMUM)
                self._ask_all(is_last=True)
            best = self._finished(wanted)
            if self.record.found and not best:
                self._ask_of_whole_program()
        except (KeyboardInterrupt, Interrupted):
            self.ended = "Ctrl-C"
        best = best or self._finished(wanted)
        if not best and self.ended == "Ctrl-C":
            raise nothing_found_yet()
        if not best and (not self.record.has_some or self.record.was_refused):
            entries, regions = self.record.asked, self._asker.regions
            raise refusal(entries, self.request, regions, self.whole_program)
        return best

    def _ask_all(self, *, is_last: bool = False) -> None:
        """Ask until nothing that is left can be better, or the time is over."""
        while self._queue and self.ended != "Ctrl-C":
            if self._is_over(is_last=is_last):
                self.ended = "time"
                return
            question = min(self._queue, key=self._order)
            rule = self._queue.pop(question)
            if rule == TEMPLATE and self._is_guessed_anew(question):
                continue
            cutoff = self.record.cutoff(question)
            # The least memory is looked for whatever fits.
            if rule != MINIMUM and (bound := self._bound(question, cutoff)) >= cutoff:
                self.record.ruled_out[question] = bound
                if bound == math.inf:  # for want of memory
                    self._follow(SearchEntry(question, TooLarge(bound), rule))
                continue
            self._show("plan", str(question))
            is_late = self.record.has_some and self._costs.of(question) > self._patience.left()
            started = time.process_time()
            answer = OutOfTime() if is_late else self._asker.ask(question, cutoff)
            self._costs.note(question, time.process_time() - started)
            if isinstance(answer, OutOfTime):
                self._queue[question], self.ended = rule, "time"
                return
            self._learn(SearchEntry(question, answer, rule))
            if self._asker.was_interrupted and not self.ended:
                self.ended = "time" if self._patience.is_over() else "Ctrl-C"

    def _is_guessed_anew(self, template: Question) -> bool:
        """Put another way in the place of a template, if answers have made it more likely."""
        guess = self.templates.guess(template, self._estimates)
        if guess in self._seen:
            return False
        del self._seen[template]
        self._add([guess], TEMPLATE)
        return True

    def _learn(self, entry: SearchEntry) -> None:
        """Keep an answer, correct the estimates by it, and add the questions that follow."""
        self.record.add(entry)
        question, answer = entry.question, entry.answer
        if isinstance(answer, Found):
            self._estimates.learn(question, answer.seconds)
            self._estimates.learn_bytes(question, answer.candidate.memory.peak)
        elif isinstance(answer, TooLarge):
            if answer.way is not None:
                self._estimates.learn(question, answer.way.seconds)
            self._estimates.learn_bytes(question, answer.least_bytes)
        self._follow(entry)

    def _follow(self, entry: SearchEntry) -> None:
        """Add the questions that follow from an answer."""
        for rule in RULES:
            self._add(rule.follow(entry, self), rule)

    def _add(self, questions: Iterable[Question], rule: FollowUp) -> None:
        for question in map(self.templates.normalised, questions):
            if question not in self._seen:
                self._seen[question] = None
                self._queue[question] = rule

    def _order(self, question: Question) -> float:
        """Return the place in the queue: estimated seconds, more where memory overflows."""
        estimate = self._estimates.of(question)
        too_large = max(1.0, estimate.bytes_ / self.request.memory)
        seconds = estimate.seconds * (1 - self._estimates.doubt(question))
        is_pressing = not self.record.has_some and self._patience.is_half_over()
        later = 1 + self._queue[question].later
        if question.schedule is not None:
            later *= _DEARER
        return seconds * later * too_large ** (8 if is_pressing else 2) * handicap(question)

    def _bound(self, question: Question, cutoff: float) -> float:
        """Return the seconds that a question takes at least, as far as `cutoff` asks for it."""
        least = self._bounds.seconds(question)
        if least < cutoff and question.schedule is not None and not self._asker.is_huge:
            try:
                schedule = listed(question.schedule, question.stages, question.microbatches)
            except InvalidInput:
                return least  # the answer says so
            least = self._bounds.seconds(question, schedule, cutoff)
        return least

    def _is_over(self, *, is_last: bool) -> bool:
        patience, is_late = self._patience, False
        if not self.record.has_some:
            is_late = patience.is_late() and not is_last
        return patience.is_over() and (self.record.has_some or is_late)

    @property
    def _is_refused(self) -> bool:
        """Return whether the program has none of the stages and micro-batches, in any memory."""
        answers = [entry.answer for entry in self.record.asked]
        is_answered = bool(answers) and not self._queue and not self.record.ruled_out
        return is_answered and all(isinstance(answer, Refused) for answer in answers)

    def _report_or_stop(self, phase: str, detail: str) -> None:
        """Show what an answer looks at; end it when the time is over."""
        if self.record.found and self._patience.is_over():
            raise layout_search.DeadlinePassed
        self._show(phase, detail)

    def _show(self, phase: str, detail: str) -> None:
        """Show what is looked at, and the best so far."""
        seconds = seconds_text(self.record.fastest)
        best = f"best so far {seconds}" if self.record.found else ""
        self._report(phase, "; ".join(filter(None, (detail, best))))

    def _ask_of_whole_program(self) -> None:
        """Ask again what was answered: the blocks of the whole program are not as equal as those of
        the short one."""
        answered = [*self.record.found]
        self._queue.clear()
        self.record.found.clear()
        self._asker.whole = None
        for entry in answered:
            self._add([replace(entry.question, program=self.whole_program)], entry.rule)
        self._ask_all(is_last=True)

    def _finished(self, wanted: int) -> list[Candidate]:
        """Return the best ways that differ, of the whole program, with what bounds are known."""
        best: dict[str, Candidate] = {}
        for entry in self.record.by_simplicity():
            if len(best) == wanted or not isinstance(entry.answer, Found):
                break
            if (whole := self._asker.finished(entry.answer.candidate)) is not None:
                how = whole.alternative(self.request.memory).how
                best.setdefault(how, self._accounted(whole, entry.question))
        return list(best.values())

    def _accounted(self, best: Candidate, question: Question) -> Candidate:
        """Return a way with what is known of the least that a step takes, and of other meshes."""
        if (search := best.search) is None:
            return best
        if best.pipelining is None:
            search = search.taken(best.seconds)
        search = replace(search, considered=self.record.considered(question, best.mesh))
        bound = min([search.bound, self.record.least, *map(self._bounds.seconds, self._queue)])
        return best.changed(search.cut_short(bound) if self.ended else search.lowered(bound))

    def seconds(self, question: Question) -> float:
        """Return what a question is likely to take."""
        return self._estimates.of(question).seconds

    @property
    def fastest(self) -> float:
        """Return the seconds of the fastest way so far."""
        return self.record.fastest

    def constraints(
        self, program: Captured, decided: Mapping[str, Recompute], mesh: Mesh
    ) -> Constraints:
        """Return what annotations ask for, where these regions are recomputed."""
        return self._asker.constraints(program, decided, mesh)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Return all ways that were weighed, the best first."""
        return best_first(map(self._asker.figures, self.record.priced()))

    @property
    def left_out(self) -> Counter[str]:
        """Return how many questions bounds ruled out."""
        return Counter({"questions": len(self.record.ruled_out)})
