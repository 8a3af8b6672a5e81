"""Rules: which questions follow from an answer, and why. The table is `RULES`.

    for rule in RULES:
        for question in rule.follow(asked, search): ...   # is asked when its turn comes

A rule looks at one question with its answer, and at what was found so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.mesh import Mesh
from autopar.planner.question import (
    MIXED,
    Answer,
    Found,
    Question,
    TooLarge,
    TooSlow,
    Unlike,
)
from autopar.planner.request import MOST_AXES, MOST_INNER_AXES, Request
from autopar.planner.templates import Templates
from autopar.recompute import Recompute
from autopar.states import BUFFER_BYTES, States

NEAR = 0.05  # relative to the best: ways that are so much slower may win in another form
LESS = 0.9  # of a limit for layouts: few layouts are in between
_BUFFERS = (128 << 20, 512 << 20)  # bytes that travel together
_ON_HOST = tuple(Recompute(kind, "host") for kind in ("full",))
_IN_PIECES = (Recompute(None, "cut"), Recompute("selective", "cut"), Recompute("full", "cut"))


@dataclass(frozen=True)
class Asked:
    """A question with its answer, and the rule that asked it."""

    question: Question
    answer: Answer
    rule: str

    def __str__(self) -> str:
        return f"{self.question}: {self.answer} ({self.rule})"


class Progress(Protocol):
    """What rules know of the search."""

    templates: Templates
    request: Request
    whole_program: Captured
    hosted: Sequence[States]

    @property
    def fastest(self) -> float:
        """The seconds of the best so far."""

    def seconds(self, question: Question) -> float:
        """Return what a question is likely to take."""


@dataclass(frozen=True)
class Rule:
    """When which questions follow, and why."""

    name: str
    reason: str
    follow: Callable[[Asked, Progress], Iterator[Question]]


def _other_schedules(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if isinstance(asked.answer, Found | TooLarge | TooSlow) and question.schedule is not None:
        for schedule in search.templates.schedules(question.stages, question.microbatches):
            yield replace(question, schedule=schedule)


def _cut_states(asked: Asked, search: Progress) -> Iterator[Question]:
    if isinstance(asked.answer, TooLarge):
        for states in search.templates.states(asked.question.stages):
            yield replace(asked.question, states=states)


def _fewer_cuts(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if isinstance(asked.answer, Found) and question.states.is_cut:
        for states in search.templates.states(question.stages):
            if states == question.states:
                break
            yield replace(question, states=states)


def _recompute(asked: Asked, search: Progress) -> Iterator[Question]:
    if isinstance(asked.answer, TooLarge) and MIXED in search.templates.kinds:
        yield replace(asked.question, recompute=MIXED)


def _own_layouts(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    is_plain = question.states.is_whole and question.recompute == search.templates.kinds[0]
    if not is_plain and search.request.mode == "auto" and _is_near(asked, search, NEAR):
        yield replace(question, has_own_layouts=True)


def _shared_layouts(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if search.request.states is not None and question.states.keeps_mesh and question.states.is_cut:
        yield replace(question, has_own_layouts=False)


def _leaner_layouts(asked: Asked, search: Progress) -> Iterator[Question]:
    question, answer = asked.question, asked.answer
    if not isinstance(answer, TooLarge) or search.request.mode != "auto":
        return
    if question.memory == math.inf:
        limit = search.request.room(question.stages)
        yield replace(question, memory=limit, has_own_layouts=True)
    elif question.schedule is not None and answer.smallest is None:
        # Stages are uneven, and keep several micro-batches: leaner layouts may leave room.
        limit = LESS * question.memory * search.request.memory / answer.least_bytes
        if limit > _LEANEST * search.request.room(question.stages):
            yield replace(question, memory=limit)


_LEANEST = 0.2  # of the memory of a stage's devices: layouts are not made leaner than that


def _finer_meshes(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if search.request.mesh is None and _is_best(asked, search):
        is_straight = question.stages == question.microbatches == 1
        most = MOST_AXES if is_straight else MOST_INNER_AXES + 1
        for mesh in question.meshes:
            for finer in _split(mesh, most):
                yield replace(question, meshes=(finer,))


MINIMUM = "minimum memory"
MOST_MINIMA = 3  # numbers of stages in which the least memory is looked for


def minimum_memory(asked: Sequence[Asked], search: Progress) -> Iterator[Question]:
    """Return what is asked where nothing fits: the layouts that take least, in a few numbers of
    stages, with the micro-batches of which all ranks together keep least."""
    sizes: dict[int, Question] = {}
    for one in asked:
        question = one.question
        best = sizes.setdefault(question.stages, question)
        if question.microbatches > best.microbatches:
            sizes[question.stages] = question
    for question in list(sizes.values())[:MOST_MINIMA]:
        settings = [*search.templates.states(question.stages), *search.hosted]
        for states in dict.fromkeys((settings[-1], settings[0])):
            yield replace(
                question,
                states=states,
                recompute=search.templates.leanest,
                memory=1.0,
                has_own_layouts=True,
            )


def _minimum(asked: Asked, search: Progress) -> Iterator[Question]:
    smallest = getattr(asked.answer, "smallest", None)
    if asked.question.memory == 1.0 and smallest is not None:
        limit = smallest.memory * asked.question.stages
        yield replace(asked.question, memory=limit * (1 + 1e-9))


def _split(mesh: Mesh, most: int) -> Iterator[Mesh]:
    """Return the meshes in which one axis of `mesh` is two."""
    sizes = mesh.shape
    if len(sizes) >= most:
        return
    for at, size in enumerate(sizes):
        for outer in (factor for factor in range(2, size) if size % factor == 0):
            split = (*sizes[:at], outer, size // outer, *sizes[at + 1 :])
            yield Mesh.of_sizes(split)


def _hidden_gathers(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if question.states.is_whole and search.request.states is None and _is_best(asked, search):
        for states in search.templates.states(question.stages)[1:2]:
            yield replace(question, states=states, has_own_layouts=True)


def _buffers(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    states = question.states
    is_free = states.is_cut and search.request.states is None
    if is_free and states.buffer_bytes == BUFFER_BYTES and _is_best(asked, search):
        for size in _BUFFERS:
            yield replace(question, states=replace(states, buffer_bytes=size))


def _pieces(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if isinstance(asked.answer, TooLarge) and question.is_mixed and question.schedule is not None:
        for kind in _IN_PIECES:
            yield replace(question, recompute=kind)


def _on_host(asked: Asked, search: Progress) -> Iterator[Question]:
    question = asked.question
    if not isinstance(asked.answer, TooLarge):
        return
    for states in search.hosted:
        yield replace(question, states=states)
    if question.is_mixed and question.schedule is not None:
        for kind in _ON_HOST:
            yield replace(question, recompute=kind)


def _whole_program(asked: Asked, search: Progress) -> Iterator[Question]:
    if isinstance(asked.answer, Unlike):
        yield replace(asked.question, program=search.whole_program)


def _is_best(asked: Asked, search: Progress) -> bool:
    """Return whether nothing is faster so far."""
    return isinstance(asked.answer, Found) and asked.answer.seconds <= search.fastest


def _is_near(asked: Asked, search: Progress, share: float) -> bool:
    """Return whether a question takes, or is likely to take, little more than the best."""
    answer = asked.answer
    if isinstance(answer, Found):
        return answer.seconds <= search.fastest * (1 + share)
    if isinstance(answer, TooLarge):
        return search.seconds(asked.question) <= search.fastest * (1 + share)
    return False


RULES: Sequence[Rule] = (
    Rule("other schedules", "the order of the work changes waiting and memory", _other_schedules),
    Rule("cut states", "states that are cut leave room", _cut_states),
    Rule("fewer cuts", "what fits may fit with states that move less", _fewer_cuts),
    Rule("recompute", "what runs again is not kept", _recompute),
    Rule("own layouts", "cut states and recomputation move other tensors", _own_layouts),
    Rule("shared layouts", "the best layouts of whole states may fit too", _shared_layouts),
    Rule("leaner layouts", "other layouts take less memory", _leaner_layouts),
    Rule("finer mesh", "another axis cuts what one axis cannot", _finer_meshes),
    Rule("hidden gathers", "forward hides gathers of cut states", _hidden_gathers),
    Rule("buffers", "larger buffers spare latency", _buffers),
    Rule("pieces", "ranks that keep the same keep a piece each", _pieces),
    Rule("host", "the host has memory, too", _on_host),
    Rule(MINIMUM, "where nothing fits, the least is told of", _minimum),
    Rule("whole program", "a short program cannot say what unequal blocks take", _whole_program),
)


def complexity(candidate: Candidate) -> int:
    """Return how much there is to understand: axes, a host, and states cut in part."""
    states = candidate.states
    axes = sum(size > 1 for size in candidate.whole_mesh.sizes.values())
    is_hosted = states.is_on_host or candidate.decisions.keeps_on_host
    return axes + is_hosted + bool(states.numbers)
