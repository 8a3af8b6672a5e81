"""Cut: the stages of a program for a schedule, fast, and within the memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.capture.annotations import Pin
from autopar.pipeline.activation_counts import bytes_held, peaks
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.costs import StageCost, StageCosts, choose_stages


def cut_stages(
    line: StageCosts,
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
    stages, most = choose_stages(line, made.stages, pins=pins), peaks(made, recompute)
    if memory is None or all(bytes_held(stages, moment) <= memory for moment in most):
        return stages
    return choose_stages(line, made.stages, pins=pins, memory=memory, peaks=most)
