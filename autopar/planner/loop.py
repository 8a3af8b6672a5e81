"""The loop over questions: it asks, the most promising first, and takes the best answer.

    planner = Planner(model, captured, request, report)
    planner.best()                 # the candidate, or the refusal that says what is missing
    planner.asked                  # every question with its answer, in order

The queue starts with the templates. Each answer corrects the estimates of what is still in it, and
adds the questions that follow by a rule. A question whose lower bound is no better than the best so
far is never asked. Only here is looked at the clock, and Ctrl-C is caught.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from autopar.base.garbage_collection import frozen_objects
from autopar.candidates.alternative import Alternative, best_first
from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks
from autopar.errors import Interrupted
from autopar.mesh import Mesh
from autopar.planner.asker import Asker
from autopar.planner.estimates import Estimates
from autopar.planner.hosting import may_go
from autopar.planner.patience import Ended
from autopar.planner.question import Found, OutOfTime, Question, Refused, TooLarge
from autopar.planner.refusals import refusal
from autopar.planner.request import Request
from autopar.planner.rules import MINIMUM, RULES, Asked, complexity, minimum_memory
from autopar.planner.schedule_lists import listed
from autopar.planner.templates import Templates
from autopar.recompute import Recompute
from autopar.search.constraints import Constraints
from autopar.search.layout_search import OutOfTime as OutOfTimeSignal
from autopar.search.layout_search import is_large, nothing_found_yet
from autopar.text.progress import Report
from autopar.text.units import seconds_text

EQUAL = 1e-9  # relative: what differs by less is as fast
SIMPLER = 0.01  # relative: what a more complex plan must gain
HOSTED = 0.1  # relative: what a plan that keeps something on the host must gain


class Planner:
    """Finds the best way to run a step of one program on the machines of one request."""

    def __init__(
        self, model: nn.Module, captured: Captured, request: Request, report: Report
    ) -> None:
        self.request, self._report = request, report
        self._asker = Asker(model, captured, request, self._look)
        self.whole_program, self.hosted = captured, request.hosted
        if not may_go(model, request.states):
            self.hosted = ()
        program, regions = self._asker.program, self._asker.regions
        self.templates = Templates(program, request, regions, len(blocks(captured)))
        self._bounds = self._asker.bounds
        self.state_bytes = self._bounds.states
        self._estimates = Estimates(program, request, self._bounds)
        self.asked: list[Asked] = []
        self.found: list[Candidate] = []  # the fastest first
        self.left_out: Counter[str] = Counter()
        self.ended: Ended = ""
        self._queue: dict[Question, str] = {}  # with the rule that asks
        self._seen: dict[Question, None] = {}

    @property
    def fastest(self) -> float:
        """The seconds of the best so far."""
        return min(self.request.fastest, self.found[0].seconds if self.found else math.inf)

    @frozen_objects()
    def best(self, wanted: int = 1) -> list[Candidate]:
        """Return the best ways to run a step that differ, at most so many; refuse if none fits.
        None are returned if nothing is faster than what the request is to beat."""
        is_large_program = is_large(self._asker.program)
        least_stages = self._asker.least_stages
        first = self.templates.first(self._estimates, least_stages, is_large=is_large_program)
        self._add(first, "template")
        try:
            self._ask_all()
            if not self.found and self.request.fastest == math.inf:
                self._add(minimum_memory([*self._seen], self), MINIMUM)
                self._ask_all(is_last=True)
            best = self._finished(wanted)
            if self.found and not best:
                self._ask_of_whole_program()
                best = self._finished(wanted)
        except (KeyboardInterrupt, Interrupted):
            self.ended = "Ctrl-C"
            if not (best := self._finished(wanted)):
                raise nothing_found_yet() from None
        if not best and (self.request.fastest == math.inf or self._refused):
            raise refusal(self.asked, self.request, self._asker.regions, self.whole_program)
        return best

    def _ask_of_whole_program(self) -> None:
        """Ask again what was answered: the blocks of the whole program are not as equal as those of
        the short one."""
        answered = [one for one in self.asked if _is_found(one)]
        self._queue.clear()
        self.found.clear()
        self._asker.whole = None
        for one in answered:
            self._add([replace(one.question, program=self.whole_program)], one.rule)
        self._ask_all(is_last=True)

    def _finished(self, wanted: int) -> list[Candidate]:
        """Return the best ways that differ, of the whole program, with what bounds are known."""
        best: dict[str, Candidate] = {}
        for candidate in self._by_simplicity():
            if len(best) == wanted:
                break
            if (whole := self._asker.finished(candidate)) is not None:
                how = whole.alternative(self.request.memory).how
                best.setdefault(how, self._accounted(whole))
        return list(best.values())

    def _ask_all(self, *, is_last: bool = False) -> None:
        """Ask until nothing that is left can be better, or the time is over."""
        while self._queue and self.ended != "Ctrl-C":
            if self._is_over(is_last=is_last):
                self.ended = "time"
                return
            question = min(self._queue, key=self._order)
            rule = self._queue.pop(question)
            cutoff = self._cutoff(question)
            if self._bound(question) >= cutoff:
                self.left_out["questions"] += 1
                continue
            self._look("plan", str(question))
            answer = self._asker.ask(question, cutoff)
            if isinstance(answer, OutOfTime):
                self._queue[question] = rule
                self.ended = "time"
                return
            self._learn(Asked(question, answer, rule))
            if self._asker.was_interrupted and not self.ended:
                self.ended = "time" if self.request.patience.is_over() else "Ctrl-C"

    def _learn(self, asked: Asked) -> None:
        """Keep an answer, correct the estimates by it, and add the questions that follow."""
        self.asked.append(asked)
        question, answer = asked.question, asked.answer
        if isinstance(answer, Found):
            self.found.append(answer.candidate)
            self.found.sort(key=lambda one: one.seconds)
            self._estimates.learn(question, answer.seconds)
            self._estimates.learn_bytes(question, answer.candidate.memory.peak)
        elif isinstance(answer, TooLarge):
            if answer.way is not None:
                self._estimates.learn(question, answer.way.seconds)
            self._estimates.learn_bytes(question, answer.least_bytes)
        for rule in RULES:
            self._add(rule.follow(asked, self), rule.name)

    def _add(self, questions: Iterable[Question], rule: str) -> None:
        for question in map(self.templates.normalised, questions):
            if question not in self._seen:
                self._seen[question] = None
                self._queue[question] = rule

    def _order(self, question: Question) -> float:
        """Return what a question promises: its seconds, and more where it is not likely to fit."""
        estimate, limit = self._estimates.of(question), self.request.memory
        too_large = max(1.0, estimate.bytes_ / limit)
        seconds = estimate.seconds * (1 - self._estimates.doubt(question))
        return seconds * too_large**2 * self._handicap(question)

    def seconds(self, question: Question) -> float:
        """Return what a question is likely to take."""
        return self._estimates.of(question).seconds

    def _bound(self, question: Question) -> float:
        least = self._bounds.seconds(question)
        if least < math.inf and question.schedule is not None and not self._asker.is_huge:
            try:
                made = listed(question.schedule, question.stages, question.microbatches)
            except ValueError:
                return math.inf
            least = self._bounds.seconds(question, made)
        return least

    def _cutoff(self, question: Question) -> float:
        """Return the seconds that a question has to beat to be worth it."""
        best = self.fastest
        if self.found and self._handicap(self.found[0]) > 1:
            best *= 1 + HOSTED
        simple = min((complexity(one) for one in self._nearly_best()), default=0)
        axes = sum(size > 1 for size in question.meshes[0].shape) + (question.stages > 1)
        is_simpler = bool(self.found) and axes + question.is_hosted < simple
        return best * (1 + SIMPLER if is_simpler else 1 - EQUAL) / self._handicap(question)

    @staticmethod
    def _handicap(way: Question | Candidate) -> float:
        if isinstance(way, Candidate):
            on_host = way.states.is_on_host or way.decisions.keeps_on_host
        else:
            kind = way.recompute
            on_host = way.is_hosted or (isinstance(kind, Recompute) and kind.keep == "host")
        return 1 + HOSTED if on_host else 1.0

    def _nearly_best(self) -> list[Candidate]:
        """Return what is as good as the best, but for what a simpler plan may take more."""
        if not self.found:
            return []
        least = min(one.seconds * self._handicap(one) for one in self.found)
        return [
            one for one in self.found if one.seconds * self._handicap(one) <= least * (1 + SIMPLER)
        ]

    def _by_simplicity(self) -> Iterator[Candidate]:
        """Return the simplest of what is about as fast as the best, then the others."""
        near = sorted(self._nearly_best(), key=lambda one: (complexity(one), one.seconds))
        yield from near
        yield from (one for one in self.found if one not in near)

    def _is_over(self, *, is_last: bool) -> bool:
        patience, has_some = (
            self.request.patience,
            bool(self.found) or self.request.fastest < math.inf,
        )
        return patience.is_over() and (has_some or (patience.is_late() and not is_last))

    def _look(self, phase: str, detail: str) -> None:
        """Show what is looked at; end a long answer when the time is over."""
        if self.found and self.request.patience.is_over():
            raise OutOfTimeSignal
        best = f"best so far {seconds_text(self.fastest)}" if self.found else ""
        self._report(phase, "; ".join(filter(None, (detail, best))))

    @property
    def _refused(self) -> bool:
        return any(isinstance(one.answer, TooLarge | Refused) for one in self.asked)

    def _accounted(self, best: Candidate) -> Candidate:
        """Return the best with what is known of the least that a step takes."""
        if (search := best.search) is None:
            return best
        if best.pipelining is None:
            search = search.taken(best.seconds)
        bound = min([search.bound, *(self._bounds.seconds(one) for one in self._queue)])
        if self.ended:
            return best.changed(search.cut_short(bound))
        return best.changed(search.lowered(bound))

    def constraints(
        self, program: Captured, decided: Mapping[str, Recompute], mesh: Mesh
    ) -> Constraints:
        """Return what annotations ask for, where these regions are recomputed."""
        return self._asker.constraints(program, decided, mesh)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All that was weighed, the best first."""
        ways = [_candidate(asked) for asked in self.asked]
        return best_first(self._asker.figures(way) for way in ways if way is not None)


def _is_found(asked: Asked) -> bool:
    return isinstance(asked.answer, Found)


def _candidate(asked: Asked) -> Candidate | None:
    """Return the way that was priced to answer a question, if its program was made."""
    answer = asked.answer
    if isinstance(answer, Found):
        return answer.candidate
    way = answer.way if isinstance(answer, TooLarge) else None
    return way if isinstance(way, Candidate) else None
