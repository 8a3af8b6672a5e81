"""1F1B (Narayanan et al. 2019; DAPPLE, Fan et al. 2021): one forward, one backward in turn.

Stage s starts with p - 1 - s forwards. Makespan as GPipe; stage s keeps min(p - s, m).
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import Period, generator, in_turn, straight


@generator("1f1b", {}, period=lambda stages: Period(1, stages + 3))
def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    orders = []
    for stage in range(stages):
        forwards = [Action("F", 0, stage, (m,)) for m in range(microbatches)]
        backwards = [Action("B", 0, stage, (m,)) for m in range(microbatches)]
        ahead = min(stages - 1 - stage, microbatches)
        orders.append(in_turn(forwards, backwards, ahead))
    return make("1f1b", microbatches, [straight(stages)], orders)
