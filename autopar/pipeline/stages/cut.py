"""Cut: the stages of a program for a schedule, exactly, by predicted time and memory.

A dynamic programme over the cut points between layers finds the stages of which the slowest is
fastest; of equal ones, those that send least. Each holds a parameter where that is possible, since
torch's optimizers refuse a rank that has none. Stages that share a rank and its memory are left to
shared_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.capture.annotations import Pin
from autopar.errors import InvalidInput
from autopar.pipeline.memory.activation_counts import Live
from autopar.pipeline.stages.pins import pinned
from autopar.pipeline.stages.shared_memory import cut_together
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.pipeline.stages.stage_hardware import ANYWHERE, Standing
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.text.units import counted


def choose_stages(
    costs: StageCosts,
    count: int,
    *,
    pins: Sequence[Pin] = (),
    memory: float | None = None,
    peaks: Sequence[Live] = (),
    standing: Sequence[Standing] = (),
) -> list[StageCost]:
    """Cut a program into `count` stages.

    `memory`: bytes that a rank may take. Each of `peaks` says what a rank keeps at one time.
    `standing`: where each stage stands, if that matters.
    """
    where = standing or [ANYWHERE] * count
    fixed = pinned(costs, pins, count)
    points = costs.cut_points(count, fixed)
    table = costs.table(tuple(points))
    offered = table.offered(count, {s: points.index(point) for s, point in fixed.items()})
    seconds = [costs.times(tuple(points), at) for at in where]
    rooms = [] if memory is None else [memory + min(where[s].spare for s in live) for live in peaks]
    if any(len(live) > 1 for live in peaks[: len(rooms)]):
        found = cut_together(table, offered, rooms, peaks, seconds)
    else:
        for live, room in zip(peaks, rooms):
            for stage, counts in live.items():
                offered[stage] &= table.bytes(*counts) <= room
        found = table.fastest(offered, seconds)
    if found is None:
        raise _none_fits(count, memory)
    return costs.stages([points[index] for index in found], where)


def _none_fits(count: int, memory: float | None) -> InvalidInput:
    return InvalidInput(
        "the model can be cut so that the stages fit",
        got=f"{counted(count, 'stage')}"
        + (f" on ranks of at most {memory:.3g} bytes" if memory else ""),
        remedy="more memory, more stages, or other pinned modules",
    )
