"""Chimera's placement filled by list scheduling instead of units.

Each rank runs what is ready: a forward of the deepest stage, then the oldest, while that stage
keeps fewer than p - s micro-batches and the rank fewer than p; else a backward of the stage nearest
to the input. For even m >= p and B = 2F the makespan exceeds m(F + B) by (p - 2) B with at most p
micro-batches on a rank. With latency one more is allowed: it hides the time on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.schedule import Action
from autopar.pipeline.schedules.list_scheduling import (
    Choice,
    Rule,
    StageState,
    list_schedule,
    rooms,
)


def list_orders(
    placement: Sequence[Sequence[int]],
    runs: Sequence[range],
    forward: Sequence[float],
    backward: Sequence[float],
    latency: float,
) -> list[list[Action]]:
    """The orders of all ranks, planned with the stages' times."""
    limit = len(placement[0]) + (latency > 0)
    for reserve in (0, 1):  # without a reserve the ranks may come to wait for each other
        rule = _rule(len(placement[0]), rooms(placement, limit, reserve))
        times = {"F": forward, "B": backward}
        orders = list_schedule(placement, runs, times, latency, rule)
        if orders is not None:
            return orders
    raise AssertionError("with a reserve no rank waits forever")


def _rule(stages: int, room: dict[tuple[int, int], int]) -> Rule:
    def choose(rank: int, held: list[StageState]) -> Choice | None:
        kept = sum(state.in_flight for state in held)
        ready = [
            state
            for state in held
            if state.ready["F"]
            and state.in_flight < stages - state.stage
            and kept < room[state.pipe, state.stage]
        ]
        if ready:
            return "F", max(ready, key=lambda state: (state.stage, -state.ready["F"][0]))
        ready = [state for state in held if state.ready["B"]]
        return ("B", min(ready, key=lambda state: state.stage)) if ready else None

    return choose
