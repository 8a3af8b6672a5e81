"""ZB-V (Qi et al. 2024): split backward, two chunks on each rank in a V.

Rank 0 holds the first and the last stage. With F = I = W the makespan exceeds m(F + B) by
(p - 1) / 2; every rank keeps p micro-batches.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Kind, Schedule, make
from autopar.pipeline.schedules.registry import Period, generator, leave_out, vee


@generator("zb-v", {}, period=lambda stages: Period(1, 2 * stages + 3))
def zb_v(stages: int, microbatches: int) -> Schedule:
    steps = max(2 * stages - 1, microbatches)  # enough to fill the V; the rest is left out
    orders = [leave_out(_order(stages, rank, steps), microbatches) for rank in range(stages)]
    return make("zb-v", microbatches, [vee(stages)], orders)


def _order(stages: int, rank: int, microbatches: int) -> list[Action]:
    order: list[Action] = []
    local = (rank, 2 * stages - 1 - rank)
    counts = {(kind, chunk): 0 for kind in ("F", "I", "W") for chunk in (0, 1)}

    def do(kind: Kind, chunk: int) -> None:
        order.append(Action(kind, 0, local[chunk], (counts[kind, chunk],)))
        counts[kind, chunk] += 1

    def backward(chunk: int) -> None:
        do("I", chunk)
        do("W", chunk)

    for _ in range(2 * (stages - rank) - 1):
        do("F", 0)
    for _ in range(rank):
        do("F", 1)
        do("F", 0)
    for _ in range(stages - rank):
        do("F", 1)
        backward(1)
    while counts["F", 1] < microbatches:
        if counts["F", 0] < microbatches:
            do("F", 0)
        backward(0)
        do("F", 1)
        backward(1)
    for _ in range(rank):
        do("I", 0)
        do("I", 1)
    for _ in range(stages - rank):
        backward(0)
    for chunk in (1, 0):
        while counts["W", chunk] < microbatches:
            do("W", chunk)
    return order
