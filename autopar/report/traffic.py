"""Traffic: what a rank sends in a predicted step, from the collectives and messages that its price
counts.

It is the mean of all ranks along a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.cluster import AxisLink
from autopar.cost.ways import in_order
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.price import sums_along
from autopar.pipeline.step_memory import Part
from autopar.planner.candidate import Candidate

Axes = tuple[str, ...]
_Sent = tuple[Axes, str, float, float]  # axes, what for, bytes, and in how many


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step over the links of a group along some axes, and for what."""

    axes: Axes
    what: str
    link: AxisLink
    bytes: float
    count: float  # collectives, or messages


def traffic(candidate: Candidate) -> list[Traffic]:
    """By axes and by what is sent, the most first."""
    found: dict[tuple[Axes, str], Traffic] = {}
    made = candidate.pipelining
    for axes, what, size, count in [
        *_of_program(candidate),
        *([] if made is None else _of_pipeline(candidate, made)),
    ]:
        before = found.get((axes, what))
        link = candidate.cluster.group_link(candidate.whole_mesh, axes)
        size, count = (size + before.bytes, count + before.count) if before else (size, count)
        found[axes, what] = Traffic(axes, what, link, size, count)
    return sorted((one for one in found.values() if one.bytes), key=lambda one: -one.bytes)


def _of_program(candidate: Candidate) -> Iterator[_Sent]:
    """Over the axes inside of a stage."""
    mesh, made = candidate.mesh, candidate.pipelining
    # How often a rank runs all of the program; the stages that each make what several read.
    runs, stages = float(candidate.microbatches), dict[fx.Node, set[int]]()
    if made is not None:
        runs, cut = made.schedule.all_parts / made.schedule.ranks, candidate.cut(made)
        read = (cut.flow.read_at | cut.flow.held_at).items()
        stages = {node: {cut.stage_at(place) for place in places} for node, places in read}
    for node in candidate.rewritten.nodes:
        own = stages.get(node, {0})
        part = 1.0 if made is None else len(made.schedule.holders(own)) / made.schedule.ranks
        for one in candidate.prices.collectives(node):
            times = part if one.when == "step" else runs * len(own)
            sent = one.sent(mesh.degree(one.axes)) * times
            yield in_order(one.axes, mesh), one.what or one.kind, sent, times


def _of_pipeline(candidate: Candidate, made: Pipelining) -> Iterator[_Sent]:
    """From stage to stage, and between the places that hold the same parameters."""
    schedule, axes = made.schedule, (made.axis,)
    stages = candidate.taken_by_stages(made)
    size, count = 0.0, 0
    for order, messages in zip(schedule.orders, schedule.messages):
        for action, (_, _, goes_away) in zip(order, messages):
            if goes_away:
                is_forward = action.kind == "F"
                at = stages[action.stage + 1 if is_forward else action.stage].sizes
                each = float(at[Part.RECEIVED if is_forward else Part.GIVEN])
                size, count = size + each * len(action.microbatches), count + 1
    yield axes, "messages between stages", size / schedule.ranks, count / schedule.ranks
    for one in sums_along(made):
        held = len(one.places) / schedule.ranks
        yield axes, one.moved.what, one.moved.sent(len(one.places)) * held, held
