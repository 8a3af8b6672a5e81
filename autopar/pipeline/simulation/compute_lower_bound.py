"""Least time: what a step takes at least under a schedule, however work is spread over its stages.

    least_time(schedule("1f1b", stages=4, microbatches=8))      # 2.75: of work 1, on 4 ranks

A makespan is the length of its longest path of actions, so the largest of many sums of what stages
take. The least of it over all spreads is a linear program, to which paths are added as they turn
out to be the longest. Before the last is there its minimum is lower: it is a bound at any time.
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
CLOSE = 0.005  # relative: the bound is not looked at further
_SLACK = 1e-6  # relative, of a solver that rounds
_KINDS = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}  # which parts of a stage's work each does


def least_time(made: Schedule, enough: float = math.inf) -> float:
    """At least so many times what one micro-batch takes through all stages, forward and backward.

    Of each stage the gradients of weights take no more than half of its backward. A bound of
    `enough` is not looked at further.
    """
    from ortools.linear_solver import pywraplp  # as slow to load as all of autopar

    stages = made.stages
    program = pywraplp.Solver.CreateSolver("GLOP")
    length = program.NumVar(0, program.infinity(), "")
    spread = [program.NumVar(0, program.infinity(), "") for _ in range(3 * stages)]
    program.Add(sum(spread) == 1)
    for stage in range(stages):
        program.Add(spread[stages + stage] >= spread[2 * stages + stage])
    if not any(action.overlaps for _, action in made.actions):
        for order in made.orders:  # a rank does one action at a time
            program.Add(length >= _sum(_work(order, stages), spread))
    program.Minimize(length)
    point, bound = [1 / len(spread)] * len(spread), 0.0
    for _ in range(ROUNDS):
        timeline = _simulated(made, point)
        path = _work(timeline.critical_path.actions, stages)
        # An action of an overlapping pair stands for both.
        scale = timeline.makespan / _sum(path, point)
        program.Add(length >= scale * _sum(path, spread))
        if program.Solve() != pywraplp.Solver.OPTIMAL:
            break
        bound = max(bound, program.Objective().Value())
        is_close = timeline.makespan - bound <= CLOSE * timeline.makespan
        if is_close or bound * (1 - _SLACK) >= enough:
            break
        # Half way to the answer: paths that are long near there.
        point = [(old + new.solution_value()) / 2 for old, new in zip(point, spread)]
    return bound * (1 - _SLACK)


def _simulated(made: Schedule, point: list[float]) -> Timeline:
    """A step in which stages take these parts of the work of a micro-batch."""
    stages, parts = made.stages, made.parts
    forward, inputs, weights = (
        [parts * one for one in point[kind * stages : (kind + 1) * stages]] for kind in range(3)
    )
    backward = [one + other for one, other in zip(inputs, weights)]
    return simulate(made, forward=forward, backward=backward, backward_weight=weights)


def _work(actions: Iterable[Action], stages: int) -> Counter[int]:
    """How often each stage's forward, gradients of inputs and of weights are among actions."""
    found = Counter[int]()
    for action in actions:
        for kind in _KINDS[action.kind]:
            found[kind * stages + action.stage] += len(action.microbatches)
    return found


def _sum(work: Counter[int], spread: Sequence[Any]) -> Any:
    return sum(count * spread[at] for at, count in work.items())
