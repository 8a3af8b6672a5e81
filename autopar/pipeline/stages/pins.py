"""Pins: the starts of stages that a user has fixed, by `shard(module, stage=k)`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.capture.annotations import Pin
from autopar.errors import InvalidInput
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.strategies.node_info import info


def pinned_points(costs: StageCosts, pins: Sequence[Pin], count: int) -> dict[int, int]:
    """Return the cut point at which each pinned stage starts."""
    fixed: dict[int, int] = {}
    by_stage: dict[int, Pin] = {}
    for pin in sorted(pins, key=lambda pin: pin.stage):
        point = _first_point_of(costs, pin)
        if not 0 <= pin.stage < count:
            _refuse(pin, f"stage {pin.stage} of {count}", f"a stage from 1 to {count - 1}")
        if pin.stage == 0 and point > 0:
            _refuse(pin, "stage 0 begins with the model", "leave it out")
        other = by_stage.setdefault(pin.stage, pin)
        if fixed.setdefault(pin.stage, point) != point:
            _refuse(pin, f"stage {pin.stage} starts at {other.module} too", "keep one of them")
    for (early, first), (late, second) in itertools.pairwise(fixed.items()):
        if second - first < late - early:
            _refuse(
                by_stage[late],
                f"{by_stage[late].module} for stage {late} does not come after "
                f"{by_stage[early].module} for stage {early}",
                "number the stages in the order in which the model runs",
            )
    return fixed


def _first_point_of(costs: StageCosts, pin: Pin) -> int:
    inside = pin.module + "."
    paths = [info(node).module for node in costs.flow.activations]
    places = [i for i, path in enumerate(paths) if path == pin.module or path.startswith(inside)]
    if not places:
        _refuse(pin, f"{pin.module} does nothing on the way to the loss", "pin another module")
    point = places[0]
    if point and not costs.is_clean(point, costs.total):
        values = ", ".join(node.name for node in costs.flow.crossing(point))
        _refuse(
            pin,
            f"{pin.module} lies inside a residual or a branch: {values} would be sent together",
            "pin the module that contains the whole of it",
        )
    return point


def _refuse(pin: Pin, reason: str, remedy: str) -> None:
    raise InvalidInput(
        "a pinned module starts a stage, between two layers and in their order",
        got=reason,
        remedy=remedy,
        source=pin.source,
    )
