"""The bytes that a rank sends in a predicted step, as the mean over the ranks of a pipeline.

They are counted from the collectives and messages that the price counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.candidates.candidate import Candidate
from autopar.cluster import AxisLink
from autopar.cost.copy_groups import in_mesh_order
from autopar.pipeline.memory.memory_items import MemoryItem
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.simulation.step_price import pipeline_reductions

Axes = tuple[str, ...]
_Sent = tuple[Axes, str, float, float]  # axes, what for, bytes, and in how many


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that one rank sends in a step over the links of some axes, for one purpose."""

    axes: Axes
    what: str
    link: AxisLink
    bytes: float
    count: float  # collectives, or messages


def link_traffic(candidate: Candidate) -> list[LinkTraffic]:
    """List what is sent by axes and purpose, the most first."""
    entries: dict[tuple[Axes, str], LinkTraffic] = {}
    pipelining = candidate.pipelining
    for axes, what, size, count in [
        *_of_program(candidate),
        *([] if pipelining is None else _of_pipeline(candidate, pipelining)),
    ]:
        before = entries.get((axes, what))
        link = candidate.cluster.group_link(candidate.whole_mesh, axes)
        size, count = (size + before.bytes, count + before.count) if before else (size, count)
        entries[axes, what] = LinkTraffic(axes, what, link, size, count)
    return sorted(
        (entry for entry in entries.values() if entry.bytes), key=lambda entry: -entry.bytes
    )


def _of_program(candidate: Candidate) -> Iterator[_Sent]:
    """Yield what is sent over the axes inside a stage."""
    mesh, pipelining = candidate.mesh, candidate.pipelining
    # How often a rank runs all of the program; the stages that each make what several read.
    runs, stages = float(candidate.microbatches), dict[fx.Node, set[int]]()
    if pipelining is not None:
        runs, cut = (
            pipelining.schedule.batch_parts / pipelining.schedule.ranks,
            candidate.cut(pipelining),
        )
        read = (cut.flow.read_at | cut.flow.held_at).items()
        stages = {node: {cut.stage_at(place) for place in places} for node, places in read}
    for node in candidate.rewritten.nodes:
        stages_of_node = stages.get(node, {0})
        part = (
            1.0
            if pipelining is None
            else len(pipelining.schedule.holders(stages_of_node)) / pipelining.schedule.ranks
        )
        for collective in candidate.prices.collectives(node):
            times = part if collective.when == "step" else runs * len(stages_of_node)
            sent = collective.sent(mesh.degree(collective.axes)) * times
            yield (
                in_mesh_order(collective.axes, mesh),
                collective.what or collective.kind,
                sent,
                times,
            )


def _of_pipeline(candidate: Candidate, pipelining: Pipelining) -> Iterator[_Sent]:
    """Yield messages between stages, and gradient sums between places with the same parameters."""
    schedule, axes = pipelining.schedule, (pipelining.axis,)
    stages = candidate.taken_by_stages(pipelining)
    size, count = 0.0, 0
    for order, messages in zip(schedule.orders, schedule.messages):
        for action, (_, _, goes_away) in zip(order, messages):
            if goes_away:
                is_forward = action.kind == "F"
                at = stages[action.stage + 1 if is_forward else action.stage].sizes
                each = float(at[MemoryItem.RECEIVED if is_forward else MemoryItem.GIVEN])
                size, count = size + each * len(action.microbatches), count + 1
    yield axes, "messages between stages", size / schedule.ranks, count / schedule.ranks
    for reduction in pipeline_reductions(pipelining):
        held = len(reduction.places) / schedule.ranks
        yield axes, reduction.moved.what, reduction.moved.sent(len(reduction.places)) * held, held
