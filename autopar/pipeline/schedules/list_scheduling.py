"""List scheduling: play the step through with given times, each rank taking what a rule chooses.

The orders in which the ranks took their actions are the schedule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    return _Play(placement, runs, times, latency, choose).orders_of_all()


class _Event(NamedTuple):
    """The end of an action on a rank; or, not the end, the arrival of what it sent."""

    is_end: bool
    rank: int
    state: StageState
    kind: Kind
    slice: int


class _Play:
    """A step in progress."""

    def __init__(
        self,
        placement: Sequence[Sequence[int]],
        runs: Sequence[range],
        times: Mapping[str, Sequence[float]],
        latency: float,
        choose: Rule,
    ) -> None:
        self.placement, self.times, self.latency, self.choose = placement, times, latency, choose
        ranks = len(set(placement[0]))
        self.down: Kind = "I" if "I" in times else "B"
        self.kinds: tuple[Kind, ...] = ("F", "I", "W") if self.down == "I" else ("F", "B")
        self.states: dict[tuple[int, int], StageState] = {}
        self.held: list[list[StageState]] = [[] for _ in range(ranks)]
        for pipe, row in enumerate(placement):
            for stage, rank in enumerate(row):
                state = StageState(pipe, stage, {kind: deque() for kind in self.kinds})
                state.left = dict.fromkeys(self.kinds, len(runs[pipe]))
                self.states[pipe, stage] = state
                self.held[rank].append(state)
            self.states[pipe, 0].ready["F"].extend(runs[pipe])
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.busy = [False] * ranks
        self.events: list[tuple[float, int, _Event]] = []  # by time; of equals the first first
        self.count = 0

    def orders_of_all(self) -> list[list[Action]] | None:
        """Play to the end."""
        now = 0.0
        touched = set(range(len(self.orders)))
        while True:
            while self.events and self.events[0][0] <= now:
                time, _, event = heapq.heappop(self.events)
                self.happen(time, event)
                touched.add(event.rank)
            for rank in sorted(touched):
                if not self.busy[rank]:
                    self.start(now, rank)
            touched.clear()
            if not self.events:
                break
            now = self.events[0][0]
        missing = any(state.left[kind] for state in self.states.values() for kind in self.kinds)
        return None if missing else self.orders

    def push(self, time: float, event: _Event) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def start(self, time: float, rank: int) -> None:
        """What the rule chooses for a rank that is free, if anything."""
        choice = self.choose(rank, self.held[rank])
        if choice is None:
            return
        kind, state = choice
        microbatch = state.ready[kind].popleft()
        state.left[kind] -= 1
        if kind == "F":
            state.in_flight += 1
        self.orders[rank].append(Action(kind, state.pipe, state.stage, (microbatch,)))
        self.busy[rank] = True
        self.push(time + self.times[kind][state.stage], _Event(True, rank, state, kind, microbatch))

    def happen(self, time: float, event: _Event) -> None:
        """What an event makes ready, here and on the next stage."""
        rank, state, kind, microbatch = event.rank, event.state, event.kind, event.slice
        if not event.is_end:
            state.ready[kind].append(microbatch)
            return
        self.busy[rank] = False
        if kind in "BW":
            state.in_flight -= 1
        if kind == "I":
            state.ready["W"].append(microbatch)
        target = state.stage + 1 if kind == "F" else state.stage - 1
        if kind == "F" and target == len(self.placement[state.pipe]):
            state.ready[self.down].append(microbatch)
        elif kind != "W" and target >= 0:
            there = self.placement[state.pipe][target]
            arrival = _Event(False, there, self.states[state.pipe, target], kind, microbatch)
            self.push(time + (self.latency if there != rank else 0.0), arrival)
