"""Chimera's placement with split backward, planned for given times.

A list schedule in which W fills what F and I leave idle. No one rule of choice is best for all
times, so the plans of a few rules are compared and the shortest is kept. With F = I = W and even
m >= p the makespan of two pipes exceeds m(F + B) by p/2 - 1, the time until the first input reaches
the middle, with at most p micro-batches on a rank. A plan made for F = I = W is a poor one at other
ratios: give the measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Kind, Schedule, make
from autopar.pipeline.schedules.chimera_placement import chimera_placement, shares
from autopar.pipeline.schedules.list_scheduling import ListSchedule, greedy
from autopar.pipeline.schedules.registry import generator, positive
from autopar.pipeline.simulation.action_costs import Costs, StageTimes, plain, single, stage_times
from autopar.pipeline.simulation.action_times import time_actions
from autopar.text.units import counted

ORDERS: tuple[tuple[Kind, ...], ...] = (("F", "I", "W"), ("I", "F", "W"))


@generator("chimera-zb")
def chimera_zb(
    stages: int,
    microbatches: int,
    pipes: int = 2,
    forward: Costs = 1,
    backward: Costs = 2,
    backward_weight: Costs | None = None,
    latency: float = 0,
    limit: int | None = None,
) -> Schedule:
    """Return the shortest of a few list schedules with split backward on Chimera's placement.

    `limit` is the most micro-batches that a rank keeps, `stages` by default.
    """
    placement = chimera_placement("chimera-zb", stages, pipes)
    most = stages if limit is None else limit
    positive("chimera-zb", "limit", most)
    if most < pipes:
        raise InvalidInput(
            "chimera-zb keeps at least one micro-batch for each pipe on a rank",
            got=f"limit={limit} with {counted(pipes, 'pipe')}",
            remedy=f"give limit of at least {pipes}",
        )
    times = stage_times(stages, forward, backward, backward_weight=backward_weight)
    delay = single("latency", latency)
    runs = shares(0, microbatches, pipes)
    options = {
        "pipes": pipes,
        "forward": plain(forward),
        "backward": plain(backward),
        "backward_weight": None if backward_weight is None else plain(backward_weight),
        "latency": latency,
        "limit": limit,
    }
    bound = _bound(placement, runs, times, delay) * (1 + 1e-9)
    best: tuple[float, Schedule] | None = None
    for order, nearest, reserve in product(ORDERS, (True, False), (0, 1)):
        rule = greedy(placement, order, most, reserve=reserve, nearest=nearest)
        orders = ListSchedule(placement, runs, times, delay, rule, order).play()
        if orders is None:
            continue
        plan = make("chimera-zb", microbatches, placement, orders, **options)
        makespan = max(ends[-1] for ends in time_actions(plan, times, delay).ends if ends)
        if best is None or makespan < best[0]:
            best = makespan, plan
        if makespan <= bound:
            break
    assert best is not None  # with a reserve there is no deadlock
    return best[1]


def _bound(
    placement: Sequence[Sequence[int]], runs: Sequence[range], times: StageTimes, latency: float
) -> float:
    """No plan is shorter: each rank waits for its first input and then has all its work to do."""
    first: dict[int, float] = {}
    work: dict[int, float] = {}
    for row, run_ in zip(placement, runs):
        reached = 0.0
        for stage, rank in enumerate(row):
            if run_:
                first[rank] = min(first.get(rank, reached), reached)
            work[rank] = work.get(rank, 0.0) + len(run_) * (times["F"][stage] + times["B"][stage])
            reached += times["F"][stage] + latency
    return max(first[rank] + work[rank] for rank in first)
