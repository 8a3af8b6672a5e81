"""Charts of the memory of ranks over a predicted step.

Without a pipeline memory is followed call by call, in a pipeline action by action. The top of a
chart is the peak that the plan predicts for its rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby

from autopar.candidates.candidate import Candidate
from autopar.cost.footprint import CONSTANT_KINDS, AtPeak
from autopar.pipeline.memory.memory_items import BytesByKind
from autopar.pipeline.memory.memory_timeline import MemoryTimeline
from autopar.pipeline.memory.step_timeline import bytes_by_call, peaks_by_action
from autopar.report.step_parts import BarShare
from autopar.text.drawing import WIDE, Axis, Drawing, legend_places
from autopar.text.units import bytes_text, seconds_text

_LEFT, _HEIGHT, _BELOW = 70.0, 124.0, 22.0
_RANKS = 8  # that are drawn
_CLASSES = {"activations": "kept"}  # the others are called as they are
_ORDER = tuple(field.name for field in fields(AtPeak))


@dataclass(frozen=True)
class RankMemoryTimeline:
    """The bytes of each kind that one rank holds over a step, with their times."""

    title: str
    rank: int  # of the pipeline
    span: float  # seconds of the step
    held: Sequence[tuple[float, float, BytesByKind]]

    @cached_property
    def most(self) -> BytesByKind:
        """The bytes of each kind when their sum is largest."""
        return max((kinds for _, _, kinds in self.held), key=lambda kinds: sum(kinds.values()))

    @property
    def top(self) -> float:
        return sum(self.most.values())

    def thinned(self, places: int) -> list[tuple[float, float, BytesByKind]]:
        """Return the largest sample of each of `places` equal parts of the step."""
        each = self.span / places or 1.0
        samples = []
        for _, some in groupby(self.held, lambda sample: int(sample[0] / each)):
            group = [*some]
            most = max(group, key=lambda sample: sum(sample[2].values()))
            samples.append((group[0][0], group[-1][1], most[2]))
        return samples


def rank_memories(candidate: Candidate) -> list[RankMemoryTimeline]:
    """Return the memory of some ranks of a pipeline, the fullest first; without a pipeline of one.

    Returns nothing for a program without a loss, which makes no step.
    """
    if candidate.loss is None:
        return []
    if candidate.pipelining is None or candidate.timeline is None:
        return [_with_lasting(candidate, 0, "a rank", _by_call(candidate))]
    schedule, timeline = candidate.pipelining.schedule, candidate.timeline
    stages = candidate.taken_by_stages(candidate.pipelining)
    memories = []
    peaks = [memory.peak for memory in candidate.memories]
    each = max(1, -(-schedule.ranks // _RANKS))
    for rank in dict.fromkeys([peaks.index(max(peaks)), *range(0, schedule.ranks, each)]):
        course = peaks_by_action(schedule, rank, stages)
        held = [*zip(timeline.starts[rank], timeline.ends[rank], course)]
        memories.append(_with_lasting(candidate, rank, f"rank {rank} of the pipeline", held))
    return memories


def _with_lasting(
    candidate: Candidate, rank: int, who: str, samples: Sequence[tuple[float, float, BytesByKind]]
) -> RankMemoryTimeline:
    """Add what stays through the step, and the gradients that the optimizer finds at its end."""
    held = candidate.memories[rank]
    lasting = held.gathered - candidate.passing_copies(rank)
    span, end = candidate.seconds, max((end for _, end, _ in samples), default=0.0)
    all_samples = [*samples, (end, span, {"gradients": held.gradients})]
    stays = {kind: getattr(held, kind) for kind in CONSTANT_KINDS}
    whole = [
        # Seconds that are added up one by one end a rounding late.
        (
            min(start, span),
            min(end, span),
            {**kinds, **stays, "gathered": kinds.get("gathered", 0.0) + lasting},
        )
        for start, end, kinds in all_samples
    ]
    return RankMemoryTimeline(f"{who}: at most {bytes_text(held.peak)}", rank, span, whole)


def held_at_peak(candidate: Candidate) -> list[BarShare]:
    """List the kinds of bytes that make up the peak of the fullest device."""
    return [
        BarShare(kind, _CLASSES.get(kind, kind), size, bytes_text(size))
        for kind, size in candidate.memory.parts.items()
        if round(size) > 0
    ]


def _by_call(candidate: Candidate) -> list[tuple[float, float, BytesByKind]]:
    """Follow each micro-batch call by call, forward and backward, without a pipeline."""
    program, loss = candidate.program_memory, candidate.loss
    assert program is not None
    assert loss is not None
    course = MemoryTimeline(candidate.rewritten, candidate.mesh, [loss], candidate.travel)
    calls = [node for node in candidate.rewritten.nodes if node.op == "call_function"]
    costs = {node.name: candidate.prices.own(node) for node in calls}
    samples, now = list[tuple[float, float, BytesByKind]](), 0.0
    for number, run in enumerate(bytes_by_call(program, course, candidate.microbatches)):
        if number % 2:
            seconds = {name: cost.backward for name, cost in reversed(costs.items())}
        else:
            seconds = {name: cost.forward for name, cost in costs.items()}
        durations = _seconds_up_to(seconds, {name for name, _ in run})
        for name, held in run:
            after = now + durations.pop(name, 0.0)
            samples.append((now, after, held))
            now = after
    return samples


def _seconds_up_to(seconds: Mapping[str, float], named: Collection[str]) -> dict[str, float]:
    """Sum seconds up to each call in `named`; calls between two of them count for the later one."""
    totals, before = dict[str, float](), 0.0
    for name, seconds_of_call in seconds.items():
        before += seconds_of_call
        if name in named:
            totals[name], before = before, 0.0
    return totals


def shows_limit(course: RankMemoryTimeline, limit: float) -> bool:
    """Return whether the device's limit lies inside the chart."""
    return limit <= 1.5 * course.top


def draw_memory(course: RankMemoryTimeline, limit: float, width: float = WIDE) -> Drawing:
    """Draw the kinds of bytes stacked over time."""
    right = width - 24
    across, samples = Axis(0.0, course.span, _LEFT, right), course.thinned(int(right - _LEFT))
    is_near = shows_limit(course, limit)
    kinds = [kind for kind in _ORDER if any(held.get(kind) for _, _, held in samples)]
    legend = legend_places(kinds, 4.0, width)
    top = 32.0 + (legend[-1][2] if legend else 0.0)
    picture = Drawing(width, top + _HEIGHT + _BELOW, f"memory of {course.title}")
    up = Axis(0.0, max(course.top, limit * is_near) * 1.04 or 1.0, top + _HEIGHT, top)
    for value, words in up.labels(4, bytes_text):
        picture.line([(_LEFT, up.at(value)), (right, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, words, "end")
    for value, words in across.labels(8, seconds_text, room=8.0):
        picture.text(across.at(value), picture.height - 6, words, "middle")
    picture.text(4, 14, course.title)
    below = [0.0] * len(samples)
    for kind, x, y in legend:
        above = [low + held.get(kind, 0.0) for low, (_, _, held) in zip(below, samples)]
        upper = [(across.at(t), up.at(v)) for sample, v in zip(samples, above) for t in sample[:2]]
        lower = [(across.at(t), up.at(v)) for sample, v in zip(samples, below) for t in sample[:2]]
        name = _CLASSES.get(kind, kind)
        most = max(held.get(kind, 0.0) for _, _, held in course.held)
        picture.area([*upper, *reversed(lower)], name, f"{kind}: at most {bytes_text(most)}")
        picture.box(x, y + 11, 10, 10, name)
        picture.text(x + 14, y + 20, kind)
        below = above
    if is_near:
        picture.line([(_LEFT, up.at(limit)), (right, up.at(limit))], "limit")
    return picture
