"""Step: the parts of a predicted step, and what a rank holds while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.drawing import Axis, Drawing
from autopar.pipeline.course import ProgramCourse
from autopar.pipeline.step_memory import KINDS, course_of_step
from autopar.planner.candidate import Candidate
from autopar.units import bytes_text, seconds_text

_WIDTH, _LEFT, _HEIGHT, _BELOW = 960.0, 70.0, 170.0, 22.0
_RANKS = 8  # that are drawn
_CLASSES = {"activations": "kept", "states": "states"}  # the others are called as they are


@dataclass(frozen=True)
class Share:
    """A part of a whole."""

    name: str
    kind: str
    size: float
    text: str


def seconds(candidate: Candidate) -> list[Share]:
    """What a step's predicted time is made of."""
    cost = candidate.cost
    parts = {
        ("forward", "F0"): cost.compute * cost.forward / ((cost.forward + cost.backward) or 1.0),
        ("backward", "B0"): cost.compute * cost.backward / ((cost.forward + cost.backward) or 1.0),
        ("communication that nothing hides", "shown"): cost.exposed,
        ("bubble", "bubble"): cost.bubble,
        ("updates on the host", "sync"): cost.updated,
    }
    return [Share(*key, size, seconds_text(size)) for key, size in parts.items() if size > 0]


def bytes_held(candidate: Candidate) -> list[Share]:
    """What the fullest device holds of each kind when that takes most."""
    memory = candidate.memory
    kinds = ("parameters", "gradients", "optimizer", "buffers", "gathered", "activations", "inputs")
    classes = ("states", "gradients", "sync", "working", "copies", "kept", "messages")
    parts = {key: float(getattr(memory, key[0])) for key in zip(kinds, classes)}
    return [Share(*key, size, bytes_text(size)) for key, size in parts.items() if size > 0]


def bar(shares: Sequence[Share], whole: float, label: str) -> Drawing:
    """Parts beside each other, of a whole."""
    picture = Drawing(_WIDTH, 18, label)
    picture.box(0, 0, _WIDTH, 18, "idle")
    x = 0.0
    for share in shares:
        width = share.size / whole * _WIDTH if whole else 0.0
        picture.box(x, 0, width, 18, share.kind, title=f"{share.name}: {share.text}")
        x += width
    return picture


def memory_pictures(candidate: Candidate, limit: float) -> list[Drawing]:
    """What ranks hold over a step: a picture for each of some ranks of a pipeline, the fullest
    first; or one."""
    if candidate.loss is None:
        return []
    if candidate.pipelining is None or candidate.timeline is None:
        return [_of_program(candidate, limit)]
    made, timeline = candidate.pipelining.schedule, candidate.timeline
    stages = candidate.taken_by_stages(candidate.pipelining)
    found, span = list[Drawing](), timeline.step_time
    peaks = [memory.peak for memory in candidate.memories]
    fullest = peaks.index(max(peaks))
    each = max(1, -(-made.ranks // _RANKS))
    for rank in dict.fromkeys([fullest, *range(0, made.ranks, each)]):
        kinds = course_of_step(made, rank, stages)
        held = candidate.memories[rank]
        states = held.parameters + held.optimizer + held.buffers
        times = [*zip(timeline.starts[rank], timeline.ends[rank])]
        title = f"rank {rank} of the pipeline: at most {bytes_text(held.peak)}"
        found.append(_areas(title, times, {"states": [states] * len(times), **kinds}, limit, span))
    return found


def _of_program(candidate: Candidate, limit: float) -> Drawing:
    """Call by call, forward and backward."""
    assert candidate.loss is not None
    course = ProgramCourse(candidate.rewritten, candidate.mesh, [candidate.loss], candidate.travel)
    own = {node.name: candidate.prices.own(node) for node in candidate.rewritten.nodes}
    moments = [*course.forward, *course.backward]
    held, times, now = candidate.memory, [], 0.0
    last = None
    for moment in moments:
        cost = own[moment.call]
        long = 0.0 if moment.call == last else cost.backward if moment.is_backward else cost.forward
        times.append((now, now + long))
        now, last = now + long, moment.call
    kinds = {
        "states": [held.parameters + held.optimizer + held.buffers] * len(moments),
        "activations": [one.kept for one in moments],
        "gradients": [one.gradients + one.flowing for one in moments],
        "copies": [one.copies or 0.0 for one in moments],
        "working": [one.more for one in moments],
    }
    title = f"a rank, in one micro-batch: at most {bytes_text(held.peak)}"
    return _areas(title, times, kinds, limit, now)


def _areas(
    title: str,
    times: Sequence[tuple[float, float]],
    kinds: Mapping[str, Sequence[float]],
    limit: float,
    span: float,
) -> Drawing:
    """Kinds on top of each other over time."""
    order = ["states", *KINDS]
    shown = {kind: kinds[kind] for kind in order if any(kinds.get(kind, ()))}
    whole = [sum(sizes) for sizes in zip(*shown.values())]
    most = max(whole, default=0.0)
    is_near = limit <= 1.5 * most
    picture = Drawing(_WIDTH, _HEIGHT, f"memory of {title}")
    across = Axis(0.0, span, _LEFT, _WIDTH - 24)
    up = Axis(0.0, max(most, limit if is_near else 0.0) * 1.04 or 1.0, _HEIGHT - _BELOW, 24)
    for value in up.ticks(4):
        picture.line([(_LEFT, up.at(value)), (_WIDTH - 24, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, bytes_text(value), "end")
    for value in across.ticks(8):
        picture.text(across.at(value), _HEIGHT - 6, seconds_text(value), "middle")
    below = [0.0] * len(times)
    x = _LEFT
    picture.text(x, 14, title)
    x += 40 + 6 * len(title)
    for kind, sizes in shown.items():
        above = [low + size for low, size in zip(below, sizes)]
        upper = [(across.at(t), up.at(v)) for pair, v in zip(times, above) for t in pair]
        lower = [(across.at(t), up.at(v)) for pair, v in zip(times, below) for t in pair]
        name = _CLASSES.get(kind, kind)
        picture.area([*upper, *reversed(lower)], name, f"{kind}: at most {bytes_text(max(sizes))}")
        picture.box(x, 5, 10, 10, name)
        picture.text(x + 14, 14, kind)
        x += 28 + 6.2 * len(kind)
        below = above
    if is_near:
        picture.line([(_LEFT, up.at(limit)), (_WIDTH - 24, up.at(limit))], "limit")
    return picture
