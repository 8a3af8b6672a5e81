"""Exact cut of a program into the stages of a schedule, by predicted time and memory.

A dynamic programme over the cut points between layers minimises the slowest stage, then the bytes
that are sent. Each stage holds a parameter where that is possible, since torch's optimizers refuse
a rank that has none. `shared_memory.py` cuts stages that share the memory of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.capture.annotations import Pin
from autopar.errors import InvalidInput
from autopar.pipeline.memory.activation_counts import Live
from autopar.pipeline.stages.pins import pinned_points
from autopar.pipeline.stages.shared_memory import cut_together
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.pipeline.stages.stage_hardware import ANYWHERE, StageHardware
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.text.units import counted


def choose_stages(
    costs: StageCosts,
    count: int,
    *,
    pins: Sequence[Pin] = (),
    memory: float | None = None,
    peaks: Sequence[Live] = (),
    hardware: Sequence[StageHardware] = (),
) -> list[StageCost]:
    """Cut a program into `count` stages.

    `memory`: the bytes of a rank; None: unlimited. `peaks`: counts of live activations on a rank at
    one time. `hardware`: that of each stage, if it differs.
    """
    hardware = hardware or [ANYWHERE] * count
    fixed = pinned_points(costs, pins, count)
    points = costs.cut_points(count, fixed)
    table = costs.table(tuple(points))
    offered = table.offered(count, {s: points.index(point) for s, point in fixed.items()})
    seconds = [costs.times(tuple(points), of_stage) for of_stage in hardware]
    rooms = (
        [] if memory is None else [memory + min(hardware[s].spare for s in live) for live in peaks]
    )
    if any(len(live) > 1 for live in peaks[: len(rooms)]):
        cut = cut_together(table, offered, rooms, peaks, seconds)
    else:
        for live, room in zip(peaks, rooms):
            for stage, counts in live.items():
                offered[stage] &= table.bytes(*counts) <= room
        cut = table.fastest(offered, seconds)
    if cut is None:
        raise _none_fits(count, memory)
    return costs.stages([points[index] for index in cut], hardware)


def _none_fits(count: int, memory: float | None) -> InvalidInput:
    return InvalidInput(
        "the model can be cut so that the stages fit",
        got=f"{counted(count, 'stage')}"
        + (f" on ranks of at most {memory:.3g} bytes" if memory else ""),
        remedy="more memory, more stages, or other pinned modules",
    )
