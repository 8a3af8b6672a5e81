"""The micro-batches that ranks keep, action by action, with which peaks are compared."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add

from autopar.pipeline.memory.activation_counts import Live, LiveCounts
from autopar.pipeline.schedule import Action, Schedule


def live_microbatches(schedule: Schedule, rank: int, *, recompute: bool = False) -> Iterator[Live]:
    """Yield the counts of a rank each time that one has grown."""
    again = int(recompute)
    steps: dict[str, list[LiveCounts]] = {
        "F": [(1, 1, 0, 0, 0)],
        "B": [(0, 0, 0, again, 0), (-1, -1, 0, -again, 0)],
        "I": [(0, 0, 0, 0, again), (-1, -1, 1, 0, -again)],
        "W": [(0, 0, -1, 0, 0)],
    }
    live: dict[int, LiveCounts] = dict.fromkeys(schedule.stages_on(rank), (0,) * 5)
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
