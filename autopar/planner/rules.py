"""Rules: which questions follow from an answer, and why. The table is `RULES`.

    for rule in RULES:
        for question in rule.follow(entry, search): ...   # is asked when its turn comes

A rule looks at one question with its answer, and at what was found so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Protocol

from autopar.candidates.axis_roles import axis_roles
from autopar.candidates.candidate import Candidate
from autopar.candidates.nested_states import faster_states, larger_buffers
from autopar.candidates.request import MOST_AXES, MOST_INNER_AXES, Request
from autopar.candidates.search_step import SearchStep
from autopar.capture.captured import Captured
from autopar.mesh import Mesh
from autopar.planner.layouts import LESS
from autopar.planner.question import (
    Answer,
    Found,
    Question,
    Refused,
    TooLarge,
    Unlike,
)
from autopar.planner.templates import Templates
from autopar.recompute import FULL, Recompute
from autopar.states import BUFFER_BYTES, States

SIMPLER = 0.01  # relative: what a more complex plan must gain
NEAR = 0.05  # relative to the best: ways that are so much slower may win in another form
_PARTS = (1.0, 0.7, 0.5, 0.35)  # of the memory of a stage's devices: limits for its layouts
_MOST_PARTIAL = 4
_IN_PIECES = (Recompute(None, "cut"), Recompute("selective", "cut"), Recompute("full", "cut"))


@dataclass(frozen=True)
class SearchEntry:
    """A question with its answer, and the rule that asked it."""

    question: Question
    answer: Answer
    rule: FollowUp

    @property
    def step(self) -> SearchStep:
        """Return the question and its answer in words."""
        question, answer = str(self.question), str(self.answer)
        return SearchStep(question, answer, self.rule.name, self.rule.reason)

    def __str__(self) -> str:
        return str(self.step)


class Progress(Protocol):
    """The state of the search, as rules read it."""

    templates: Templates
    request: Request
    whole_program: Captured
    hosted: Sequence[States]

    @property
    def fastest(self) -> float:
        """Return the seconds of the best so far."""

    def seconds(self, question: Question) -> float:
        """Return what a question is likely to take."""


@dataclass(frozen=True)
class FollowUp:
    """A rule: the questions that follow from an answer, and why."""

    name: str
    reason: str
    follow: Callable[[SearchEntry, Progress], Iterator[Question]]
    later: float = 0.0  # relative: what promises so much more is asked first, it may gain more


def _other_schedules(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    if question.schedule is not None and _is_first(question, search):
        for schedule in search.templates.schedules(question.stages, question.microbatches):
            yield replace(question, schedule=schedule)


def _cut_states(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    if isinstance(entry.answer, TooLarge) and _is_first(question, search):
        for states in _settings_after(question.states, search.templates.states(question.stages)):
            yield replace(question, states=states)


def _fewer_cuts(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    settings = search.templates.states(question.stages)
    if isinstance(entry.answer, Found | Refused) and _is_first(question, search):
        fewer = len(settings) - len(_settings_after(question.states, settings)) - 1
        # Without replicas no states are cut.
        for states in settings[:1] if isinstance(entry.answer, Refused) else settings[:fewer]:
            yield replace(question, states=states)


def _recompute(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    plain, *others = search.templates.kinds
    if not _is_first(question, search):
        return
    if question.is_mixed:  # layouts in which nothing has to run again are other ones
        yield replace(question, recompute=plain)
    elif isinstance(entry.answer, TooLarge) and question.recompute == plain:
        for kind in others:
            yield replace(question, recompute=kind)


def _own_layouts(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    if question.memory < math.inf or search.request.mode != "auto":
        return
    if _is_near(entry, search, NEAR):
        yield replace(question, has_own_layouts=True)
    if isinstance(entry.answer, Refused) and question.states.is_cut and _is_first(question, search):
        # The fastest layouts have no replicas; others may.
        room = search.request.room(question.stages)
        yield replace(question, memory=room, has_own_layouts=True)


def _shared_layouts(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    is_free = search.request.mode == "auto" and question.memory == math.inf
    if search.request.states is not None and question.states.keeps_mesh and is_free:
        yield replace(question, has_own_layouts=False)


def _leaner_layouts(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question, answer = entry.question, entry.answer
    if not isinstance(answer, TooLarge) or search.request.mode != "auto" or answer.smallest:
        return
    if question.recompute in search.templates.kinds and _is_near(entry, search, NEAR):
        room = search.request.room(question.stages)
        # Stages are uneven, and keep several micro-batches: leaner layouts may leave room.
        wanted = min(room, LESS * question.memory * search.request.memory / answer.least_bytes)
        limits = [part * room for part in _PARTS if part * room < question.memory]
        if limits and (question.memory == math.inf or question.schedule is not None):
            limit = next((limit for limit in limits if limit <= wanted), limits[-1])
            yield replace(question, memory=limit, has_own_layouts=True)


def _finer_meshes(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    if search.request.mesh is None and _is_best(entry, search):
        is_straight = question.stages == question.microbatches == 1
        most = MOST_AXES if is_straight else MOST_INNER_AXES + 1
        for mesh in question.meshes:
            for finer in _split_axes(mesh, most):
                yield replace(question, meshes=(finer,))


MOST_MINIMA = 3  # numbers of stages in which the least memory is looked for


def minimum_memory(questions: Sequence[Question], search: Progress) -> Iterator[Question]:
    """Return what is asked where nothing fits: the layouts that take least on any mesh, in a few
    numbers of stages. Each is asked with the most micro-batches, which keep least; if states must
    be cut, with the fewest, of which each replica has a part."""
    sizes: dict[int, dict[Mesh, Question]] = {}
    must_cut = search.request.states is not None and search.request.states.is_cut
    sign = 1 if must_cut else -1
    for question in sorted(questions, key=lambda q: (q.stages, sign * q.microbatches)):
        alike = sizes.setdefault(question.stages, {})
        if not alike or next(iter(alike.values())).microbatches == question.microbatches:
            alike |= dict.fromkeys(question.meshes, question)
    for stages, alike in list(sizes.items())[:MOST_MINIMA]:
        settings = [*search.templates.states(stages), *search.hosted]
        # States that are cut are gathered: layouts that cut them themselves may take less.
        for states, kind in product(dict.fromkeys((settings[-1], settings[0])), _LEANEST):
            yield replace(
                next(iter(alike.values())),
                meshes=tuple(alike),
                states=states,
                recompute=kind if len(search.templates.kinds) > 1 else search.templates.kinds[0],
                memory=1.0,
                has_own_layouts=True,
                is_as_added_up=True,
            )


_LEANEST = (FULL, Recompute("full", "host"))


def _minimum(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question, answer = entry.question, entry.answer
    if entry.rule != MINIMUM or not isinstance(answer, TooLarge):
        return
    if answer.smallest is not None and question.memory == 1.0:
        limit = answer.smallest.memory * question.stages
        yield replace(question, memory=limit * (1 + 1e-9))


def _split_axes(mesh: Mesh, most: int) -> Iterator[Mesh]:
    """Return the meshes in which one axis of `mesh` is two."""
    sizes = mesh.shape
    if len(sizes) >= most:
        return
    for at, size in enumerate(sizes):
        for outer in (factor for factor in range(2, size) if size % factor == 0):
            split = (*sizes[:at], outer, size // outer, *sizes[at + 1 :])
            yield Mesh.of_sizes(split)


def _fewer_axes(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question, answer = entry.question, entry.answer
    if search.request.mesh is not None or not isinstance(answer, Found):
        return
    mesh = answer.candidate.mesh
    roles = [role.rstrip("0123456789") for role in axis_roles(answer.candidate).values()]
    if mesh in question.meshes and _is_near(entry, search, NEAR):
        for at, (role, after) in enumerate(pairwise(roles)):
            if role == after:
                sizes = mesh.shape
                merged = (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :])
                yield replace(question, meshes=(Mesh.of_sizes(merged),))


def _hidden_gathers(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question = entry.question
    is_free = search.request.states is None and search.request.mode == "auto"
    if question.states.is_whole and is_free and _is_best(entry, search):
        for states in search.templates.states(question.stages)[1:2]:
            yield replace(question, states=states, has_own_layouts=True)


def _buffers(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question, answer = entry.question, entry.answer
    is_free = search.request.states is None and question.meshes[0].size > 1
    is_plain = question.states.buffer_bytes == BUFFER_BYTES
    if isinstance(answer, Found) and is_free and is_plain and _is_best(entry, search):
        for states in larger_buffers(answer.candidate):
            yield replace(question, states=states)


def _partial_states(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    question, answer = entry.question, entry.answer
    is_free = search.request.states is None and search.request.mode == "auto"
    if not is_free or question.is_hosted or not question.states.keeps_mesh:
        return
    if isinstance(answer, Found) and _is_best(entry, search):
        faster = faster_states(answer.candidate, search.request.memory, SIMPLER)
    elif isinstance(answer, TooLarge) and isinstance(answer.way, Candidate):
        # What fits is likely to be slower.
        is_near = _is_near(entry, search, NEAR)
        faster = faster_states(answer.way, search.request.memory, -math.inf) if is_near else []
    else:
        return
    for states in faster[:_MOST_PARTIAL]:
        yield replace(question, states=states, has_own_layouts=False)


def _pieces(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    is_free = entry.question.schedule is not None and len(search.templates.kinds) > 1
    if is_free and _is_leanest(entry, search):
        for kind in _IN_PIECES:
            yield replace(entry.question, recompute=kind)


def _on_host(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    if _is_leanest(entry, search):
        for states in search.hosted:
            yield replace(entry.question, states=states)
        if entry.question.schedule is not None and len(search.templates.kinds) > 1:
            yield replace(entry.question, recompute=Recompute("full", "host"))


def _is_leanest(entry: SearchEntry, search: Progress) -> bool:
    """Return whether a size is too large though regions run again, with whole states or with all
    cut: layouts without replicas have nothing to cut."""
    question, templates = entry.question, search.templates
    settings = templates.states(question.stages)
    is_last = question.states in (settings[0], settings[-1])
    is_last &= question.recompute == templates.kinds[-1]
    return isinstance(entry.answer, TooLarge) and _is_first(question, search) and is_last


def _settings_after(states: States, settings: Sequence[States]) -> Sequence[States]:
    """Return the settings that come after one; none, if it is not among them."""
    return settings[settings.index(states) + 1 :] if states in settings else ()


def _whole_program(entry: SearchEntry, search: Progress) -> Iterator[Question]:
    if isinstance(entry.answer, Unlike):
        yield replace(entry.question, program=search.whole_program)


def _is_first(question: Question, search: Progress) -> bool:
    """Return whether layouts are those that a size is asked about first."""
    is_named = search.request.states is not None
    return question.memory == math.inf and question.has_own_layouts == is_named


def _is_best(entry: SearchEntry, search: Progress) -> bool:
    """Return whether nothing is faster so far."""
    return isinstance(entry.answer, Found) and entry.answer.seconds <= search.fastest


def _is_near(entry: SearchEntry, search: Progress, share: float) -> bool:
    """Return whether a question takes, or is likely to take, little more than the best."""
    answer = entry.answer
    if isinstance(answer, Found):
        return answer.seconds <= search.fastest * (1 + share)
    if isinstance(answer, TooLarge) and answer.least_bytes < math.inf:
        return search.seconds(entry.question) <= search.fastest * (1 + share)
    return False


TEMPLATE = FollowUp("template", "experts write it down", lambda entry, search: iter(()))
MINIMUM = FollowUp("minimum memory", "where nothing fits, the error names the least", _minimum)
RULES: Sequence[FollowUp] = (
    FollowUp("other schedules", "the order of work changes waiting and memory", _other_schedules),
    FollowUp("cut states", "states that are cut leave room", _cut_states),
    FollowUp("fewer cuts", "it fits, so states that move less may fit, too", _fewer_cuts),
    FollowUp("recompute", "recomputing saves memory", _recompute),
    FollowUp(
        "own layouts",
        "cut states and recomputation make other layouts the fastest",
        _own_layouts,
        0.02,
    ),
    FollowUp("shared layouts", "the best layouts of whole states may fit too", _shared_layouts),
    FollowUp("leaner layouts", "other layouts take less memory", _leaner_layouts, 0.02),
    FollowUp("finer mesh", "another axis cuts what one axis cannot", _finer_meshes, 0.01),
    FollowUp("fewer axes", "two axes that do the same may be one", _fewer_axes),
    FollowUp("hidden gathers", "forward hides gathers of cut states", _hidden_gathers, 0.03),
    FollowUp("buffers", "larger buffers spare latency", _buffers, 0.03),
    FollowUp("partial states", "near ranks gather faster than all, and hold less", _partial_states),
    FollowUp("pieces", "ranks that keep the same can keep a piece each", _pieces),
    FollowUp("host", "the host has memory, too", _on_host),
    MINIMUM,
    FollowUp("whole program", "a short program stands for equal blocks only", _whole_program),
)
