"""DualPipeV: DualPipe cut in half, one pipe with two chunks on each rank in a V.

With F = I = W and m >= 2p the makespan exceeds m(F + B) by p - 1 (without overlap by (p - 1)/2); a
rank keeps at most p + 1/2.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import Period, generator, vee
from autopar.pipeline.schedules.two_lanes import two_lanes


@generator("dualpipe-v", period=lambda stages, overlap=True: Period(1, 2 * stages + 3))
def dualpipe_v(stages: int, microbatches: int, *, overlap: bool = True) -> Schedule:
    counts = microbatches, microbatches
    orders = [
        [
            Action(kind, 0, (rank, 2 * stages - 1 - rank)[chunk], (number,), joint)
            for kind, chunk, number, joint in two_lanes(rank, stages, counts, overlap=overlap)
        ]
        for rank in range(stages)
    ]
    return make("dualpipe-v", microbatches, [vee(stages)], orders, overlap=overlap)
