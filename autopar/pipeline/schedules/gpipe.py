"""GPipe (Huang et al. 2019): all forwards, then all backwards.

Makespan m(F + B) + (p - 1)(F + B); every rank keeps all m micro-batches.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import generator, straight


@generator("gpipe")
def gpipe(stages: int, microbatches: int) -> Schedule:
    orders = [
        [Action(kind, 0, stage, (m,)) for kind in ("F", "B") for m in range(microbatches)]
        for stage in range(stages)
    ]
    return make("gpipe", microbatches, [straight(stages)], orders)
