"""GEMS (Jain et al. 2020): two pipes in opposite directions that take micro-batches in turn.

The forward of the next micro-batch follows the backward of this one, in its direction. Each rank
keeps one micro-batch. Makespan p F + m p B + (m - 1) F.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import Period, even_stages, generator, reverse, straight


@generator("gems", period=lambda stages: Period(2, 8))
def gems(stages: int, microbatches: int) -> Schedule:
    even_stages("gems", stages)  # else the middle rank holds both copies of its stage
    orders = [
        [
            Action(kind, m % 2, stages - 1 - rank if m % 2 else rank, (m,))
            for m in range(microbatches)
            for kind in ("F", "B")
        ]
        for rank in range(stages)
    ]
    return make("gems", microbatches, [straight(stages), reverse(stages)], orders)
