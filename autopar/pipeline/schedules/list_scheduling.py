"""List scheduling: play the step through with given times, each rank taking what a rule chooses.

The orders in which the ranks took their actions are the schedule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.pipeline.schedule import Action, Kind


@dataclass
class StageState:
    """One stage of one pipe on a rank: what is ready to run on it, and what it keeps."""

    pipe: int
    stage: int
    # By kind, the slices whose input is there, oldest first.
    ready: dict[str, deque[int]] = field(default_factory=dict)
    # Forward begun, backward (or W) not ended.
    in_flight: int = 0
    # How many of its forwards and backwards are not begun.
    left: dict[str, int] = field(default_factory=dict)


Choice = tuple[Kind, StageState]
Rule = Callable[[int, list[StageState]], Choice | None]


def rooms(
    placement: Sequence[Sequence[int]], limit: int, reserve: int
) -> dict[tuple[int, int], int]:
    """For each (pipe, stage): a forward may begin while its rank keeps fewer than this many.

    With a reserve of 1, the deepest stage of a rank may fill it up to `limit`, the next up to one
    less, and so on. Then the deepest stages always get on, so those before them do, and no rank
    waits forever whatever the times. `limit` is at least the number of pipes.
    """
    held: dict[int, list[tuple[int, int]]] = {}
    for pipe, row in enumerate(placement):
        for stage, rank in enumerate(row):
            held.setdefault(rank, []).append((stage, pipe))
    return {
        (pipe, stage): limit - reserve * deeper
        for pairs in held.values()
        for deeper, (stage, pipe) in enumerate(sorted(pairs, reverse=True))
    }


def list_schedule(
    placement: Sequence[Sequence[int]],
    runs: Sequence[range],
    times: Mapping[str, Sequence[float]],
    latency: float,
    choose: Rule,
) -> list[list[Action]] | None:
    """The orders of all ranks when `runs[pipe]` go through the pipes and `choose` decides.

    `times[kind][stage]`; the backward is split when there are times for I. None when the rule
    leaves all ranks waiting for each other.
    """
    ranks = len(set(placement[0]))
    last = len(placement[0]) - 1
    down: Kind = "I" if "I" in times else "B"
    kinds = ("F", "I", "W") if down == "I" else ("F", "B")
    states: dict[tuple[int, int], StageState] = {}
    held: list[list[StageState]] = [[] for _ in range(ranks)]
    for pipe, row in enumerate(placement):
        for stage, rank in enumerate(row):
            state = StageState(pipe, stage, {kind: deque() for kind in kinds})
            state.left = dict.fromkeys(kinds, len(runs[pipe]))
            states[pipe, stage] = state
            held[rank].append(state)
        states[pipe, 0].ready["F"].extend(runs[pipe])

    orders: list[list[Action]] = [[] for _ in range(ranks)]
    busy = [False] * ranks
    # Ends of actions: (time, rank, state, kind, slice); arrivals have kind and state of the target.
    events: list[tuple[float, int, int, int, StageState, str, int]] = []
    count = 0

    def push(time: float, end: bool, rank: int, state: StageState, kind: str, slice_: int) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (time, count, int(end), rank, state, kind, slice_))

    def finish(time: float, rank: int, state: StageState, kind: str, slice_: int) -> None:
        """What the end of an action makes ready, here and on the next stage."""
        pipe, stage = state.pipe, state.stage
        if kind in "BW":
            state.in_flight -= 1
        if kind == "I":
            state.ready["W"].append(slice_)
        if kind == "F" and stage == last:
            state.ready[down].append(slice_)
            return
        target = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or target < 0:
            return
        there = placement[pipe][target]
        push(time + (latency if there != rank else 0.0), False, there, states[pipe, target],
             kind, slice_)  # fmt: skip

    def start(time: float, rank: int) -> bool:
        choice = choose(rank, held[rank])
        if choice is None:
            return False
        kind, state = choice
        slice_ = state.ready[kind].popleft()
        state.left[kind] -= 1
        if kind == "F":
            state.in_flight += 1
        orders[rank].append(Action(kind, state.pipe, state.stage, (slice_,)))
        busy[rank] = True
        push(time + times[kind][state.stage], True, rank, state, kind, slice_)
        return True

    now = 0.0
    touched = set(range(ranks))
    while True:
        while events and events[0][0] <= now:
            time, _, end, rank, state, kind, slice_ = heapq.heappop(events)
            if end:
                busy[rank] = False
                finish(time, rank, state, kind, slice_)
            else:
                state.ready[kind].append(slice_)
            touched.add(rank)
        for rank in sorted(touched):
            if not busy[rank]:
                start(now, rank)
        touched.clear()
        if not events:
            break
        now = events[0][0]
    missing = sum(state.left[kind] for state in states.values() for kind in kinds)
    return None if missing else orders
