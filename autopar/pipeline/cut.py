"""Cut: the stages of a program for a schedule, fast, and within the memory of every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.pipeline.price import pipeline_memory
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulator import simulate
from autopar.search.flow import Flow
from autopar.search.stages import NodeCost, Pin, StageCost, choose_stages


def cut_stages(
    flow: Flow,
    mesh: Mesh,
    made: Schedule,
    *,
    cost: NodeCost,
    link_bandwidth: float = 25e9,
    pins: Sequence[Pin] = (),
    memory: float | None = None,
) -> list[StageCost]:
    """Cut a rewritten program into the stages of a schedule, its slowest as fast as can be.

    `memory`: bytes that a rank may take. With one stage on each rank the cut is the best of those
    that fit. Where a rank holds several stages, which fill its memory together, what each may take
    is lowered until the ranks fit.
    """
    kept, limit = _most_kept(made), memory
    while True:
        try:
            stages = choose_stages(
                flow,
                mesh,
                made.stages,
                cost=cost,
                link_bandwidth=link_bandwidth,
                pins=pins,
                memory=limit,
                in_flight=kept,
            )
        except InvalidInput as error:
            if limit == memory:
                raise
            raise InvalidInput(
                error.rule,
                got=f"{made.stages} stages on {made.ranks} ranks of at most {memory:.3g} bytes",
                remedy=error.remedy,
            ) from None
        timeline = simulate(made, activation=[stage.activations for stage in stages])
        if memory is None or pipeline_memory(made, stages, timeline).peak <= memory:
            return stages
        limit = math.nextafter(max(map(StageCost.bytes, stages, kept)), 0.0)


def _most_kept(schedule: Schedule) -> list[int]:
    """The most micro-batches that a rank keeps of each stage at a time."""
    most = [0] * schedule.stages
    for order in schedule.orders:
        kept = [0] * schedule.stages
        for action in order:
            change = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            kept[action.stage] += change * len(action.microbatches)
            most[action.stage] = max(most[action.stage], kept[action.stage])
    return [-(-count // schedule.parts) for count in most]
