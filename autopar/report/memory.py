"""Memory: what ranks hold while a predicted step runs, as pictures.

Without a pipeline it is followed call by call, in a pipeline action by action. The top of a picture
is the peak that the plan predicts of its rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby

from autopar.cost.footprint import LASTING, AtPeak
from autopar.drawing import Axis, Drawing
from autopar.pipeline.course import ProgramCourse
from autopar.pipeline.course_of_step import course_by_call, course_of_step
from autopar.pipeline.step_memory import Held
from autopar.planner.candidate import Candidate
from autopar.report.step import Share
from autopar.units import bytes_text, seconds_text

_WIDTH, _LEFT, _HEIGHT, _BELOW = 960.0, 70.0, 170.0, 22.0
_RANKS = 8  # that are drawn
_CLASSES = {"activations": "kept"}  # the others are called as they are
_ORDER = tuple(one.name for one in fields(AtPeak))


@dataclass(frozen=True)
class MemoryCourse:
    """What a rank holds over a step: from when to when, bytes of each kind."""

    title: str
    rank: int  # of the pipeline
    span: float  # seconds of the step
    held: Sequence[tuple[float, float, Held]]

    @cached_property
    def most(self) -> Held:
        """What it holds when that is most."""
        return max((kinds for _, _, kinds in self.held), key=lambda kinds: sum(kinds.values()))

    @property
    def top(self) -> float:
        return sum(self.most.values())

    def thinned(self, places: int) -> list[tuple[float, float, Held]]:
        """Of all that begins within one of so many equal parts of the step, what is most."""
        each = self.span / places or 1.0
        found = []
        for _, some in groupby(self.held, lambda one: int(one[0] / each)):
            own = [*some]
            most = max(own, key=lambda one: sum(one[2].values()))
            found.append((own[0][0], own[-1][1], most[2]))
        return found


def memory_courses(candidate: Candidate) -> list[MemoryCourse]:
    """Of some ranks of a pipeline, the fullest first; or of one. Of what is no step, none."""
    if candidate.loss is None:
        return []
    if candidate.pipelining is None or candidate.timeline is None:
        return [_whole(candidate, 0, "a rank", _by_call(candidate))]
    made, timeline = candidate.pipelining.schedule, candidate.timeline
    stages = candidate.taken_by_stages(candidate.pipelining)
    found = []
    peaks = [memory.peak for memory in candidate.memories]
    each = max(1, -(-made.ranks // _RANKS))
    for rank in dict.fromkeys([peaks.index(max(peaks)), *range(0, made.ranks, each)]):
        course = course_of_step(made, rank, stages)
        held = [*zip(timeline.starts[rank], timeline.ends[rank], course)]
        found.append(_whole(candidate, rank, f"rank {rank} of the pipeline", held))
    return found


def _whole(
    candidate: Candidate, rank: int, who: str, made: Sequence[tuple[float, float, Held]]
) -> MemoryCourse:
    """With what stays through the step, and what the optimizer finds at its end."""
    held = candidate.memories[rank]
    lasting = held.gathered - candidate.passing_copies(rank)
    span, end = candidate.seconds, max((end for _, end, _ in made), default=0.0)
    moments = [*made, (end, span, {"gradients": held.gradients})]
    stays = {kind: getattr(held, kind) for kind in LASTING}
    whole = [
        # Seconds that are added up one by one end a rounding late.
        (
            min(start, span),
            min(end, span),
            {**kinds, **stays, "gathered": kinds.get("gathered", 0.0) + lasting},
        )
        for start, end, kinds in moments
    ]
    return MemoryCourse(f"{who}: at most {bytes_text(held.peak)}", rank, span, whole)


def held_at_peak(candidate: Candidate) -> list[Share]:
    """What the peak of the fullest device is made of."""
    return [
        Share(kind, _CLASSES.get(kind, kind), size, bytes_text(size))
        for kind, size in candidate.memory.parts.items()
        if round(size) > 0
    ]


def _by_call(candidate: Candidate) -> list[tuple[float, float, Held]]:
    """Without a pipeline: each micro-batch call by call, forward and backward."""
    program, loss = candidate.program_memory, candidate.loss
    assert program is not None
    assert loss is not None
    course = ProgramCourse(candidate.rewritten, candidate.mesh, [loss], candidate.travel)
    calls = [node for node in candidate.rewritten.nodes if node.op == "call_function"]
    own = {node.name: candidate.prices.own(node) for node in calls}
    found, now = list[tuple[float, float, Held]](), 0.0
    for number, run in enumerate(course_by_call(program, course, candidate.microbatches)):
        if number % 2:
            seconds = {name: cost.backward for name, cost in reversed(own.items())}
        else:
            seconds = {name: cost.forward for name, cost in own.items()}
        long = _of_moments(seconds, {name for name, _ in run})
        for name, held in run:
            after = now + long.pop(name, 0.0)
            found.append((now, after, held))
            now = after
    return found


def _of_moments(seconds: Mapping[str, float], named: Collection[str]) -> dict[str, float]:
    """What calls take that are `named`, with those before them that run together with them."""
    found, before = dict[str, float](), 0.0
    for name, own in seconds.items():
        before += own
        if name in named:
            found[name], before = before, 0.0
    return found


def shows_limit(course: MemoryCourse, limit: float) -> bool:
    """Whether what a device has is within its picture."""
    return limit <= 1.5 * course.top


def drawn(course: MemoryCourse, limit: float) -> Drawing:
    """Kinds on top of each other over time."""
    across = Axis(0.0, course.span, _LEFT, _WIDTH - 24)
    moments = course.thinned(int(_WIDTH - 24 - _LEFT))
    is_near = shows_limit(course, limit)
    picture = Drawing(_WIDTH, _HEIGHT, f"memory of {course.title}")
    up = Axis(0.0, max(course.top, limit * is_near) * 1.04 or 1.0, _HEIGHT - _BELOW, 24)
    for value in up.ticks(4):
        picture.line([(_LEFT, up.at(value)), (_WIDTH - 24, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, bytes_text(value), "end")
    for value in across.ticks(8):
        picture.text(across.at(value), _HEIGHT - 6, seconds_text(value), "middle")
    x, below = _LEFT, [0.0] * len(moments)
    picture.text(x, 14, course.title)
    x += 40 + 6 * len(course.title)
    for kind in _ORDER:
        sizes = [held.get(kind, 0.0) for _, _, held in moments]
        if not any(sizes):
            continue
        above = [low + size for low, size in zip(below, sizes)]
        upper = [(across.at(t), up.at(v)) for one, v in zip(moments, above) for t in one[:2]]
        lower = [(across.at(t), up.at(v)) for one, v in zip(moments, below) for t in one[:2]]
        name = _CLASSES.get(kind, kind)
        most = max(held.get(kind, 0.0) for _, _, held in course.held)
        picture.area([*upper, *reversed(lower)], name, f"{kind}: at most {bytes_text(most)}")
        picture.box(x, 5, 10, 10, name)
        picture.text(x + 14, 14, kind)
        x += 28 + 6.2 * len(kind)
        below = above
    if is_near:
        picture.line([(_LEFT, up.at(limit)), (_WIDTH - 24, up.at(limit))], "limit")
    return picture
