"""Cut: the stages of a program for a schedule, fast, and within the memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.keeping import moments, taken
from autopar.pipeline.schedule import Schedule
from autopar.search.stages import Line, Pin, StageCost, choose_stages


def cut_stages(
    line: Line,
    made: Schedule,
    *,
    pins: Sequence[Pin] = (),
    memory: float | None = None,
    recompute: bool = False,
) -> list[StageCost]:
    """Cut a rewritten program into the stages of a schedule, its slowest as fast as can be.

    `memory`: bytes that a rank may take, with what the schedule has it keep, all activations or
    with `recompute` what stages received.
    """
    stages, most = choose_stages(line, made.stages, pins=pins), moments(made, recompute)
    if memory is None or all(taken(stages, moment) <= memory for moment in most):
        return stages
    return choose_stages(line, made.stages, pins=pins, memory=memory, moments=most)
