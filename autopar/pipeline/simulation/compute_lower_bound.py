"""Lower bound of a step under a schedule, however the work is spread over the stages.

    least_time(schedule("1f1b", stages=4, microbatches=8))      # 2.75 for work 1 on 4 ranks

A makespan is the length of the longest path of actions, hence the largest of many sums of stage
times. Its minimum over all spreads is a linear program, to which the longest paths are added one by
one. With fewer paths its minimum is lower, so it is a lower bound at any time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.pipeline.schedule import Action, Schedule
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.timeline import Timeline

ROUNDS = 40
CLOSE = 0.005  # relative gap at which the search for paths ends
_SLACK = 1e-6  # relative rounding of the solver
_KINDS = {
    "F": (0,),
    "B": (1, 2),
    "I": (1,),
    "W": (2,),
}  # of a stage's forward, input and weight gradients


def least_time(schedule: Schedule, enough: float = math.inf) -> float:
    """Return a lower bound of a step, in units of one micro-batch's work on all stages.

    The gradients of weights take at most half of a stage's backward. The search ends at a bound of
    `enough`.
    """
    from ortools.linear_solver import pywraplp  # as slow to load as all of autopar

    stages = schedule.stages
    program = pywraplp.Solver.CreateSolver("GLOP")
    length = program.NumVar(0, program.infinity(), "")
    spread = [program.NumVar(0, program.infinity(), "") for _ in range(3 * stages)]
    program.Add(sum(spread) == 1)
    for stage in range(stages):
        program.Add(spread[stages + stage] >= spread[2 * stages + stage])
    if not any(action.overlaps for _, action in schedule.actions):
        for order in schedule.orders:  # a rank does one action at a time
            program.Add(length >= _weighted_sum(_work_counts(order, stages), spread))
    program.Minimize(length)
    point, bound = [1 / len(spread)] * len(spread), 0.0
    for _ in range(ROUNDS):
        timeline = _simulated(schedule, point)
        path = _work_counts(timeline.critical_path.actions, stages)
        # An action of an overlapping pair stands for both.
        scale = timeline.makespan / _weighted_sum(path, point)
        program.Add(length >= scale * _weighted_sum(path, spread))
        if program.Solve() != pywraplp.Solver.OPTIMAL:
            break
        bound = max(bound, program.Objective().Value())
        is_close = timeline.makespan - bound <= CLOSE * timeline.makespan
        if is_close or bound * (1 - _SLACK) >= enough:
            break
        # Go half of the way: paths that are long near the answer matter.
        point = [(old + new.solution_value()) / 2 for old, new in zip(point, spread)]
    return bound * (1 - _SLACK)


def _simulated(schedule: Schedule, point: list[float]) -> Timeline:
    """Return a step in which stages take these shares of a micro-batch's work."""
    stages, parts = schedule.stages, schedule.parts
    forward, inputs, weights = (
        [parts * share for share in point[kind * stages : (kind + 1) * stages]] for kind in range(3)
    )
    backward = [sum(halves) for halves in zip(inputs, weights)]
    return simulate(schedule, forward=forward, backward=backward, backward_weight=weights)


def _work_counts(actions: Iterable[Action], stages: int) -> Counter[int]:
    """Return how often each stage's forward, input and weight gradients are among actions."""
    counts = Counter[int]()
    for action in actions:
        for kind in _KINDS[action.kind]:
            counts[kind * stages + action.stage] += len(action.microbatches)
    return counts


def _weighted_sum(work: Counter[int], spread: Sequence[Any]) -> Any:
    return sum(count * spread[at] for at, count in work.items())
