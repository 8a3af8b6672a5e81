"""Lower bound of a step under a schedule, however the work is spread over the stages.

    least_time(schedule("1f1b", stages=4, microbatches=8))      # 2.75 for work 1 on 4 ranks

A makespan is the length of the longest path of actions, hence the largest of many sums of stage
times. Its minimum over all spreads is a linear program, to which the longest paths are added one by
one. With fewer paths its minimum is lower, so it is a lower bound at any time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from autopar.pipeline.schedule import KINDS, SUM, UPDATE, Action, Schedule
from autopar.pipeline.simulation.action_costs import StageTimes
from autopar.pipeline.simulation.repeated_path import longest_path
from autopar.pipeline.simulation.repeated_step import Repeated, repeated_step
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.step_graph import Array, times_table
from autopar.pipeline.simulation.timeline import Timeline

ROUNDS = 40
CLOSE = 0.005  # relative gap at which the search for paths ends
_SLACK = 1e-6  # relative rounding of the solver
_KINDS = {
    "F": (0,),
    "B": (1, 2),
    "I": (1,),
    "W": (2,),
    SUM: (),
    UPDATE: (),
}  # of a stage's forward, input and weight gradients


def least_time(schedule: Schedule, enough: float = math.inf) -> float:
    """Return a lower bound of a step, in units of one micro-batch's work on all stages.

    The gradients of weights take at most half of a stage's backward. The search ends at a bound of
    `enough`.
    """
    if schedule.slices:  # each takes a part of its micro-batch's time that is not known here
        return schedule.batch_parts / schedule.ranks * (1 - _SLACK)
    from ortools.linear_solver import pywraplp  # as slow to load as all of autopar

    stages = schedule.stages
    program = pywraplp.Solver.CreateSolver("GLOP")
    length = program.NumVar(0, program.infinity(), "")
    spread = [program.NumVar(0, program.infinity(), "") for _ in range(3 * stages)]
    program.Add(sum(spread) == 1)
    for stage in range(stages):
        program.Add(spread[stages + stage] >= spread[2 * stages + stage])
    repeated = repeated_step(schedule)
    if not any(action.overlaps for _, action in schedule.short.actions):
        for work in _work_of_ranks(schedule, repeated):  # a rank does one action at a time
            program.Add(length >= _weighted_sum(work, spread))
    program.Minimize(length)
    if any(schedule.delays):  # steps follow one another: no rank waits for all of a path
        program.Solve()
        return program.Objective().Value() * (1 - _SLACK)
    point, bound = [1 / len(spread)] * len(spread), 0.0
    for _ in range(ROUNDS):
        makespan, path = _longest_path(schedule, repeated, point)
        # An action of an overlapping pair stands for both.
        scale = makespan / _weighted_sum(path, point)
        program.Add(length >= scale * _weighted_sum(path, spread))
        if program.Solve() != pywraplp.Solver.OPTIMAL:
            break
        bound = max(bound, program.Objective().Value())
        is_close = makespan - bound <= CLOSE * makespan
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


def _work_of_ranks(schedule: Schedule, repeated: Repeated | None) -> Iterator[Counter[int]]:
    """Yield the work of each rank in a step."""
    if repeated is None:
        for order in schedule.orders:
            yield _work_counts(order, schedule.stages)
        return
    step, repeats = repeated
    for counts in step.work + repeats * step.work_of_period:
        yield _work_of_times(counts, schedule.stages)


def _longest_path(
    schedule: Schedule, repeated: Repeated | None, point: list[float]
) -> tuple[float, Counter[int]]:
    """Return the makespan where stages take these shares of the work, and the work that decides
    it."""
    stages = schedule.stages
    if repeated is None:
        timeline = _simulated(schedule, point)
        return timeline.makespan, _work_counts(timeline.critical_path.actions, stages)
    step, repeats = repeated
    forward, inputs, weights = (point[kind * stages : (kind + 1) * stages] for kind in range(3))
    backward = [sum(halves) for halves in zip(inputs, weights)]
    durations: StageTimes = {"F": tuple(forward), "B": tuple(backward)}
    durations |= {"I": tuple(inputs), "W": tuple(weights)}
    work = _work_of_times(
        longest_path(step, times_table(schedule, durations, 0.0), repeats), stages
    )
    return float(_weighted_sum(work, point)), work


def _work_of_times(counts: Array, stages: int) -> Counter[int]:
    """Return the work of which the times of a table are, by how often they are taken."""
    work = Counter[int]()
    for number in np.flatnonzero(counts[1 : 1 + len(KINDS) * stages]).tolist():
        kind, stage = divmod(number, stages)
        for share in _KINDS[KINDS[kind]]:
            work[share * stages + stage] += int(counts[1 + number])
    return work


def _work_counts(actions: Iterable[Action], stages: int) -> Counter[int]:
    """Return how often each stage's forward, input and weight gradients are among actions."""
    counts = Counter[int]()
    for action in actions:
        for kind in _KINDS[action.kind]:
            counts[kind * stages + action.stage] += len(action.microbatches)
    return counts


def _weighted_sum(work: Counter[int], spread: Sequence[Any]) -> Any:
    return sum(count * spread[at] for at, count in work.items())
