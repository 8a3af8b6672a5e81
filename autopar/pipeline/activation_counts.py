"""Activation counts: of how many micro-batches ranks keep something, and when. By order alone.

plain            F keeps what was received and all activations, until B or I
recomputation    F keeps what was received, until B or I, which make the activations again
split backward   I keeps what the gradients of weights are made of, until W

Where micro-batches are cut in parts, their parts are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import le

from autopar.pipeline.schedule import Schedule

# Of how many micro-batches a stage keeps all that its forward keeps, of how many what it received,
# and of how many what the gradients of its weights are made of.
LiveCounts = tuple[int, int, int]
Live = Mapping[int, LiveCounts]  # what one rank keeps at one time, by stage


def live_microbatches(schedule: Schedule, rank: int, recompute: bool = False) -> Iterator[Live]:
    """What a rank keeps, each time that it has become more."""
    again = int(recompute)
    steps: dict[str, list[LiveCounts]] = {
        "F": [(1 - again, 1, 0)],
        "B": [(again, 0, 0), (-1, -1, 0)],
        "I": [(again, 0, 0), (-1, -1, 1)],
        "W": [(0, 0, -1)],
    }
    kept: dict[int, LiveCounts] = {stage: (0, 0, 0) for _, stage in schedule.local_stages(rank)}
    for action in schedule.orders[rank]:
        for more in steps[action.kind] * len(action.microbatches):
            whole, received, later = kept[action.stage]
            kept[action.stage] = whole + more[0], received + more[1], later + more[2]
            if max(more) > 0:
                yield dict(kept)


def peaks(schedule: Schedule, recompute: bool) -> list[Live]:
    """What ranks keep when they keep most.

    A moment at which a rank keeps no more of any stage than at another is left out.
    """
    found: list[Live] = []
    for rank in range(schedule.ranks):
        seen = {tuple(live.items()) for live in live_microbatches(schedule, rank, recompute)}
        flat = {one: [count for _, counts in one for count in counts] for one in seen}
        most = [
            one
            for one in seen
            if not any(one != other and all(map(le, flat[one], flat[other])) for other in seen)
        ]
        found += map(dict, sorted(most))
    return found
