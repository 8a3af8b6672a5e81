"""DualPipe (DeepSeek-AI 2024): two pipes in opposite directions, split backward at the ends.

With F = I = W and m >= 2p the makespan exceeds m(F + B) by p - 2; a rank keeps at most p + 1.
Without overlap, where a forward sends before the backward that follows it is done, by p/2 - 1 only:
overlap pays where it hides the communication inside a stage.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import Period, even_stages, generator, reverse, straight
from autopar.pipeline.schedules.two_lanes import two_lanes


@generator("dualpipe", period=lambda stages, overlap=True: Period(2, 2 * stages + 6))
def dualpipe(stages: int, microbatches: int, *, overlap: bool = True) -> Schedule:
    even_stages("dualpipe", stages)
    down = -(-microbatches // 2)
    counts = down, microbatches - down
    orders = []
    for rank in range(stages):
        local = (rank, stages - 1 - rank)
        near = int(rank >= stages // 2)  # the pipe that enters at this rank's end: lane 0
        lanes = counts[near], counts[1 - near]
        orders.append([
            Action(kind, lane ^ near, local[lane ^ near], ((lane ^ near) * down + number,), joint)
            for kind, lane, number, joint in two_lanes(
                min(local), stages // 2, lanes, overlap=overlap
            )
        ])  # fmt: skip
    placement = [straight(stages), reverse(stages)]
    return make("dualpipe", microbatches, placement, orders, overlap=overlap)
