"""Cut of stages that share the memory of a rank, by CP-SAT.

Where a rank holds several stages (both directions of Chimera, chunks), the size of one limits the
others. Every stage lies between two cut points and starts where the one before ends; at every peak
the bytes that a rank keeps stay below the limit.

Most candidates are ruled out before that: any weighted mean of the peaks is a lower bound of the
worst, and the least mean of all cuts with a given stage is a shortest path through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.memory.activation_counts import Live
from autopar.pipeline.stages.table import Mask, StageTable
from autopar.solver.cp_sat import new_model, new_solver, outcome, weighted_sum

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar

_RANGE = 1 << 24  # whole numbers for the seconds of a stage
_TIES = 1 << 14  # whole numbers for all bytes sent, which decide between equal times
_EFFORT = 2.0  # deterministic time of the solver, roughly seconds
_ROUNDS = 50  # of changing the weights of peaks
_PACE = 4.0  # of changing them


def cut_together(
    table: StageTable,
    offered: Sequence[Mask],
    memory: Sequence[float],
    peaks: Sequence[Live],
    seconds: Sequence[NDArray] | None = None,
) -> list[int] | None:
    """Return the starts of the stages whose slowest is fastest; None if no cut fits.

    `memory`: bytes at each of the peaks. `seconds`: a table for each stage, if they differ.
    """
    times = seconds or [table.seconds] * len(offered)
    offered = _narrowed(table, _possible(table, offered, memory, peaks), memory, peaks)
    if not all(map(np.any, offered)):
        return None
    model = new_model()
    rows = [list(zip(*map(np.ndarray.tolist, np.nonzero(mask)))) for mask in offered]
    takes = [[model.new_bool_var(f"{s}:{i}-{j}") for i, j in row] for s, row in enumerate(rows)]
    every = [(pair, take) for row, bits in zip(rows, takes) for pair, take in zip(row, bits)]
    longest = max(time[pair] for time, row in zip(times, rows) for pair in row)
    scaled = [(time * (_RANGE / (longest or 1.0))).astype(np.int64) for time in times]
    sent = _TIES / (sum(max(table.received[i] for i, _ in row) for row in rows) or 1)
    slowest = model.new_int_var(0, _RANGE, "slowest")
    for row, bits, time in zip(rows, takes, scaled):
        model.add_exactly_one(bits)
        model.add(slowest >= weighted_sum(bits, [time[pair] for pair in row]))
    for (row, bits), (after, others) in zip(zip(rows, takes), zip(rows[1:], takes[1:])):
        for point in {j for _, j in row} | {i for i, _ in after}:
            ending = [bit for (_, j), bit in zip(row, bits) if j == point]
            starting = [bit for (i, _), bit in zip(after, others) if i == point]
            model.add(sum(ending) == sum(starting))
    for live, room in zip(peaks, memory):
        used: list[tuple[IntVar, int]] = []
        for stage, counts in live.items():
            sizes = table.bytes(*counts)
            used += [(take, sizes[pair]) for pair, take in zip(rows[stage], takes[stage])]
        model.add(weighted_sum([take for take, _ in used], [size for _, size in used]) <= int(room))
    costs = [
        _RANGE * _TIES * int(table.empty[pair]) + int(table.received[pair[0]] * sent)
        for pair, _ in every
    ]
    model.minimize(weighted_sum([slowest, *(take for _, take in every)], [_TIES, *costs]))
    solver = new_solver(_EFFORT)
    if outcome(solver, model) not in ("OPTIMAL", "FEASIBLE"):
        return None
    return [
        next(i for (i, _), take in zip(row, bits) if solver.boolean_value(take))
        for row, bits in zip(rows, takes)
    ]


def _possible(
    table: StageTable, offered: Sequence[Mask], memory: Sequence[float], peaks: Sequence[Live]
) -> list[Mask]:
    """Return the candidates that fit beside the smallest candidates of the other stages."""
    left = [mask.copy() for mask in offered]
    for live, room in zip(peaks, memory):
        sizes = {stage: table.bytes(*counts) for stage, counts in live.items()}
        least = {s: np.where(offered[s], size, np.inf).min() for s, size in sizes.items()}
        for stage, size in sizes.items():
            others = sum(other for s, other in least.items() if s != stage)
            left[stage] &= size <= room - others
    return left


def _narrowed(
    table: StageTable, offered: Sequence[Mask], memory: Sequence[float], peaks: Sequence[Live]
) -> Sequence[Mask]:
    """Return the candidates for which no weighted mean of the peaks exceeds the limit.

    Weights move to the peaks that are worst in the cut with the least mean.
    """
    counts_at = np.zeros((len(peaks), len(offered), 6))  # LiveCounts, then 1 for the states
    rooms = np.array(memory)
    for number, live in enumerate(peaks):
        for stage, counts in live.items():
            counts_at[number, stage] = *counts, 1
    weights = np.full(len(peaks), 1 / len(peaks))
    for _ in range(_ROUNDS):
        costs = [table.bytes(*counts) for counts in np.tensordot(weights, counts_at, 1)]
        means = table.through(offered, costs)
        offered = [mean <= weights @ rooms * (1 + 1e-9) for mean in means]
        starts = table.least(offered, costs)
        if starts is None:
            break
        ends = [*starts[1:], table.count - 1]
        held = [sizes[starts, ends] for sizes in table.by_count]
        used = (counts_at * np.stack(held, 1)).sum((1, 2)) / rooms
        weights *= np.exp(_PACE * (used / used.max() - 1))
        weights /= weights.sum()
    return offered
