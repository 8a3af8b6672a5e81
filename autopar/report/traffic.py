"""Traffic: what a rank sends in a predicted step, from the collectives and messages that its price
counts.

It is the mean of all ranks along a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cluster import AxisLink
from autopar.cost.ways import in_order
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.price import sums_of_replicas
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
    # How often a rank runs all of the program, and what part of its parameters it has.
    runs, part = float(candidate.microbatches), 1.0
    if made is not None:
        ranks = made.schedule.ranks
        runs, part = made.schedule.all_parts / ranks, made.schedule.pipes / ranks
    for node in candidate.rewritten.nodes:
        for one in candidate.prices.collectives(node):
            times = part if one.when == "step" else runs
            sent = one.sent(mesh.degree(one.axes)) * times
            yield in_order(one.axes, mesh), one.what or one.kind, sent, times


def _of_pipeline(candidate: Candidate, made: Pipelining) -> Iterator[_Sent]:
    """From stage to stage, and between the replicas of one."""
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
    for one in sums_of_replicas(made):
        held = schedule.pipes / schedule.ranks
        yield axes, one.what, one.sent(schedule.pipes) * held, held
