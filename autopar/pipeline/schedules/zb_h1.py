"""ZB-H1 (Qi et al. 2024): 1F1B with split backward, each rank keeps p micro-batches.

Stage s puts its W off by s micro-batches, so that the last stages fill with W what 1F1B leaves
idle. With F = I = W the makespan exceeds m(F + B) by p - 1 for m >= p; every rank keeps p, of which
s wait for W alone: more bytes than 1F1B where products' inputs and gradients outweigh activations.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import Period, generator, straight


@generator("zb-h1", {}, period=lambda stages: Period(1, stages + 4))
def zb_h1(stages: int, microbatches: int) -> Schedule:
    orders = []
    for stage in range(stages):
        forwards = [Action("F", 0, stage, (m,)) for m in range(microbatches)]
        weights = [Action("W", 0, stage, (m,)) for m in range(microbatches)]
        ahead = min(stages - 1 - stage, microbatches)
        order = forwards[:ahead]
        for m in range(microbatches):
            order += forwards[ahead + m : ahead + m + 1]
            order.append(Action("I", 0, stage, (m,)))
            if m >= stage:
                order.append(weights[m - stage])
        orders.append(order + weights[max(microbatches - stage, 0) :])
    return make("zb-h1", microbatches, [straight(stages)], orders)
