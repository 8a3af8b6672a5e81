"""Activation counts: the micro-batches whose activations a rank keeps, by order alone.

plain            F keeps the received values and all activations, until B or I
recomputation    F keeps fewer activations; B or I recompute the rest, a region at a time
split backward   I keeps the inputs of the weight gradients, until W

Where micro-batches are cut into parts, parts are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.schedule import SUM, UPDATE, Schedule

# Micro-batches of which a stage keeps the activations of forward, the received values, the inputs
# of weight gradients; and 1 if it recomputes in an unsplit backward, in a split one.
LiveCounts = tuple[int, int, int, int, int]
Live = Mapping[int, LiveCounts]  # the counts of one rank at one time, by stage
Counts = NDArray[np.int64]


def live_counts(schedule: Schedule, rank: int, *, recompute: bool = False) -> Counts:
    """Return the counts of a rank each time that one has grown: by moment, and by its stages in
    the order of `Schedule.stages_on`."""
    again = int(recompute)
    steps: dict[str, list[LiveCounts]] = {
        "F": [(1, 1, 0, 0, 0)],
        "B": [(0, 0, 0, again, 0), (-1, -1, 0, -again, 0)],
        "I": [(0, 0, 0, 0, again), (-1, -1, 1, 0, -again)],
        "W": [(0, 0, -1, 0, 0)],
        SUM: [],
        UPDATE: [],
    }
    both_halves = schedule.split_stages if recompute else frozenset[int]()
    local = {stage: at for at, stage in enumerate(schedule.stages_on(rank))}
    stages, changes = list[int](), list[LiveCounts]()
    for action in schedule.orders[rank]:
        does_both = action.kind == "B" and action.stage in both_halves
        change = steps["I"] + steps["W"] if does_both else steps[action.kind]
        times = len(action.microbatches)
        changes += change * times
        stages += [local[action.stage]] * (len(change) * times)
    moved = np.array(changes, np.int64).reshape(-1, 5)
    counts = np.zeros((len(moved), len(local), 5), np.int64)
    counts[np.arange(len(moved)), stages] = moved
    return counts.cumsum(axis=0)[moved.max(axis=1, initial=0) > 0]


def peak_counts(schedule: Schedule, *, recompute: bool) -> list[Live]:
    """Return the counts of ranks at their peaks.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    return [live for peaks in peaks_by_rank(schedule, recompute=recompute) for live in peaks]


@lru_cache(maxsize=64)
def peaks_by_rank(schedule: Schedule, *, recompute: bool) -> list[list[Live]]:
    """Like `peak_counts`, but with a list for each rank."""
    peaks, short = list[list[Live]](), schedule.of_sequences.short
    for rank in range(short.ranks):
        moments = live_counts(short, rank, recompute=recompute)
        stages = short.stages_on(rank)
        largest = _largest(moments).tolist()
        peaks.append([dict(zip(stages, map(tuple, moment))) for moment in largest])
    return peaks


def _largest(moments: Counts) -> Counts:
    """Return the moments that are not below another one in each count, in order."""
    moments = np.unique(moments, axis=0)
    left, largest = np.argsort(-moments.sum((1, 2)), kind="stable"), list[int]()
    while len(left):  # none is below a smaller sum
        largest.append(left[0])
        left = left[(moments[left] > moments[left[0]]).any((1, 2))]
    return moments[sorted(largest)]
