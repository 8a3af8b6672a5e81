"""Activation counts: the micro-batches whose activations a rank keeps, by order alone.

plain            F keeps the received values and all activations, until B or I
recomputation    F keeps fewer activations; B or I recompute the rest, a region at a time
split backward   I keeps the inputs of the weight gradients, until W

Where micro-batches are cut into parts, parts are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import add

import numpy as np

from autopar.pipeline.schedule import Action, Schedule

# Micro-batches of which a stage keeps the activations of forward, the received values, the inputs
# of weight gradients; and 1 if it recomputes in an unsplit backward, in a split one.
LiveCounts = tuple[int, int, int, int, int]
Live = Mapping[int, LiveCounts]  # the counts of one rank at one time, by stage
LiveItems = tuple[tuple[int, LiveCounts], ...]  # the items of a `Live`


def live_microbatches(schedule: Schedule, rank: int, *, recompute: bool = False) -> Iterator[Live]:
    """Yield the counts of a rank each time that one has grown."""
    again = int(recompute)
    steps: dict[str, list[LiveCounts]] = {
        "F": [(1, 1, 0, 0, 0)],
        "B": [(0, 0, 0, again, 0), (-1, -1, 0, -again, 0)],
        "I": [(0, 0, 0, 0, again), (-1, -1, 1, 0, -again)],
        "W": [(0, 0, -1, 0, 0)],
    }
    live: dict[int, LiveCounts] = {stage: (0,) * 5 for _, stage in schedule.local_stages(rank)}
    for action in schedule.orders[rank]:
        kinds = "IW" if recompute and _does_both_halves(schedule, action) else action.kind
        changes = [change for kind in kinds for change in steps[kind]]
        for change in changes * len(action.microbatches):
            full, received, halves, unsplit, split = map(add, live[action.stage], change)
            live[action.stage] = full, received, halves, unsplit, split
            if max(change) > 0:
                yield dict(live)


def _does_both_halves(schedule: Schedule, action: Action) -> bool:
    """Return whether an action does I and W, one after the other."""
    return action.kind == "B" and action.stage in schedule.split_stages


def peak_counts(schedule: Schedule, *, recompute: bool) -> list[Live]:
    """Return the counts of ranks at their peaks.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    peaks: list[Live] = []
    for rank in range(schedule.ranks):
        moments = live_microbatches(schedule, rank, recompute=recompute)
        peaks += map(dict, sorted(_largest(list({tuple(live.items()) for live in moments}))))
    return peaks


def _largest(moments: Sequence[LiveItems]) -> list[LiveItems]:
    """Return the moments that are not below another one in each count."""
    counts = np.array([[count for _, counts in items for count in counts] for items in moments])
    largest = list[int]()
    for at in np.argsort(-counts.sum(1), kind="stable").tolist():  # none is below a smaller sum
        if not (counts[largest] >= counts[at]).all(1).any():
            largest.append(at)
    return [moments[at] for at in largest]
