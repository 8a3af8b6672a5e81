"""Times of a schedule's actions, from one number or from one number for each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import KINDS, Kind
from autopar.text.units import counted

Costs = float | Sequence[float]
StageTimes = dict[Kind, tuple[float, ...]]  # of one micro-batch on each stage, by kind of action


def plain(cost: Costs) -> float | tuple[float, ...]:
    """Return `cost` in the form in which a schedule's options keep it."""
    return cost if isinstance(cost, (int, float)) else tuple(map(float, cost))


def single(name: str, cost: object) -> float:
    """Return `cost` if it is one number; raise `InvalidInput` otherwise."""
    if not isinstance(cost, (int, float)):
        raise InvalidInput(f"{name} is one number", got=f"{name}={cost!r}", remedy=f"{name}=0.1")
    return per_stage(name, cost, 1)[0]


def per_stage(name: str, cost: Costs, stages: int, divisor: float = 1) -> tuple[float, ...]:
    """Return `cost` for each stage; one number is divided among the chunks of a rank."""
    if isinstance(cost, (int, float)) and not isinstance(cost, bool):
        values = (cost / divisor,) * stages
    elif isinstance(cost, Sequence) and not isinstance(cost, str) and len(cost) == stages:
        values = tuple(float(value) for value in cost)
    else:
        raise InvalidInput(
            f"{name} is one number, or one for each of {counted(stages, 'stage')}",
            got=f"{name}={cost!r}",
            remedy=f"give a number or {counted(stages, 'number')}",
        )
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise InvalidInput(
            f"{name} is a time: finite and not negative",
            got=f"{name}={cost!r}",
            remedy="give times of at least 0",
        )
    return values


def stage_times(
    stages: int,
    forward: Costs,
    backward: Costs,
    *,
    backward_weight: Costs | None,
    chunks: int = 1,
    parts: int = 1,
) -> StageTimes:
    """Return the times by kind: `backward` with both halves, `backward_weight` its W (half of it).

    One number is the time of a rank for one micro-batch of one pipe, so a chunk takes 1/chunks of
    it; a number for each stage is that stage's time. A part of a micro-batch takes 1/parts.
    """
    both = per_stage("backward", backward, stages, chunks)
    if backward_weight is None:
        weight = tuple(value / 2 for value in both)
    else:
        weight = per_stage("backward_weight", backward_weight, stages, chunks)
    if any(half > total for half, total in zip(weight, both)):
        raise InvalidInput(
            "backward_weight is the part of backward that can be split off",
            got=f"backward={backward!r}, backward_weight={backward_weight!r}",
            remedy="give backward_weight of at most backward",
        )
    forwards = per_stage("forward", forward, stages, chunks)
    inputs = (total - half for half, total in zip(weight, both))
    kinds = zip(KINDS, (forwards, both, inputs, weight))
    return {kind: tuple(value / parts for value in values) for kind, values in kinds}
