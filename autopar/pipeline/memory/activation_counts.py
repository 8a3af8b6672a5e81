"""Activation counts: of how many micro-batches ranks keep something, and when. By order alone.

plain            F keeps what was received and all activations, until B or I
recomputation    F keeps less of the activations; B or I make the rest again, a region at a time
split backward   I keeps what the gradients of weights are made of, until W

Where micro-batches are cut in parts, their parts are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import add

import numpy as np

from autopar.pipeline.schedule import Action, Schedule

# Of how many micro-batches a stage keeps all that its forward keeps, of how many what it received,
# of how many what the gradients of its weights are made of; and whether it makes something again in
# a backward that is whole, or in one that is split.
LiveCounts = tuple[int, int, int, int, int]
Live = Mapping[int, LiveCounts]  # what one rank keeps at one time, by stage
Kept = tuple[tuple[int, LiveCounts], ...]  # the same


def live_microbatches(schedule: Schedule, rank: int, recompute: bool = False) -> Iterator[Live]:
    """What a rank keeps, each time that it has become more."""
    again = int(recompute)
    steps: dict[str, list[LiveCounts]] = {
        "F": [(1, 1, 0, 0, 0)],
        "B": [(0, 0, 0, again, 0), (-1, -1, 0, -again, 0)],
        "I": [(0, 0, 0, 0, again), (-1, -1, 1, 0, -again)],
        "W": [(0, 0, -1, 0, 0)],
    }
    kept: dict[int, LiveCounts] = {stage: (0,) * 5 for _, stage in schedule.local_stages(rank)}
    for action in schedule.orders[rank]:
        kinds = "IW" if recompute and _is_both(schedule, action) else action.kind
        done = [more for kind in kinds for more in steps[kind]]
        for more in done * len(action.microbatches):
            whole, received, later, again, split = map(add, kept[action.stage], more)
            kept[action.stage] = whole, received, later, again, split
            if max(more) > 0:
                yield dict(kept)


def _is_both(schedule: Schedule, action: Action) -> bool:
    """Whether it does I and W, one after the other."""
    return action.kind == "B" and action.stage in schedule.split_stages


def peaks(schedule: Schedule, recompute: bool) -> list[Live]:
    """What ranks keep when they keep most.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    found: list[Live] = []
    for rank in range(schedule.ranks):
        seen = {tuple(live.items()) for live in live_microbatches(schedule, rank, recompute)}
        found += map(dict, sorted(_largest(list(seen))))
    return found


def _largest(some: Sequence[Kept]) -> list[Kept]:
    """Those that are not as small as another in each count."""
    counts = np.array([[count for _, counts in one for count in counts] for one in some])
    found = list[int]()
    for at in np.argsort(-counts.sum(1), kind="stable").tolist():  # none is below a smaller sum
        if not (counts[found] >= counts[at]).all(1).any():
            found.append(at)
    return [some[at] for at in found]
