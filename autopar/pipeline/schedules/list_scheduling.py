"""List scheduling: play the step through with given times, each rank taking what a rule chooses.

The orders in which the ranks took their actions are the schedule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.pipeline.schedule import Action, Kind
from autopar.pipeline.simulation.action_costs import StageTimes


@dataclass
class StageState:
    """One stage of one pipe on a rank: what is ready to run on it, and what it keeps."""

    pipe: int
    stage: int
    # By kind, the micro-batches whose input is there, oldest first.
    ready: dict[str, deque[int]] = field(default_factory=dict)
    # Forward begun, backward (or W) not ended.
    in_flight: int = 0


Choice = tuple[Kind, StageState]
Rule = Callable[[list[StageState]], Choice | None]


def greedy(
    placement: Sequence[Sequence[int]],
    order: Sequence[Kind],
    limit: int,
    *,
    reserve: int,
    nearest: bool = True,
    tapers: bool = False,
) -> Rule:
    """Kinds in `order`; forwards of the deepest stage, backwards of the one nearest to the input
    (or the deepest), the oldest W.

    A forward may begin while its rank keeps fewer than `limit`, at least the number of pipes;
    `tapers`: also only while its stage s of p keeps fewer than p - s. With a reserve of 1, the
    deepest stage of a rank may fill it up to `limit`, the next up to one less, and so on. Then the
    deepest stages always get on, so those before them do, and no rank waits forever whatever the
    times. Without it plans are often shorter, but may not come to an end.
    """
    stages_of: dict[int, list[tuple[int, int]]] = {}
    for pipe, row in enumerate(placement):
        for stage, rank in enumerate(row):
            stages_of.setdefault(rank, []).append((stage, pipe))
    room = {
        (pipe, stage): limit - reserve * deeper
        for pairs in stages_of.values()
        for deeper, (stage, pipe) in enumerate(sorted(pairs, reverse=True))
    }

    def choose(states: list[StageState]) -> Choice | None:
        kept = sum(state.in_flight for state in states)

        def may_begin(state: StageState) -> bool:
            most = len(placement[0]) - state.stage if tapers else limit
            return kept < room[state.pipe, state.stage] and state.in_flight < most

        for kind in order:
            ready = [state for state in states if state.ready[kind]]
            if kind == "F":
                ready = [state for state in ready if may_begin(state)]
            if not ready:
                continue
            if kind == "F":
                return kind, max(ready, key=lambda state: (state.stage, -state.ready["F"][0]))
            if kind == "W":
                return kind, min(ready, key=lambda state: state.ready["W"][0])
            pick = min if nearest else max
            return kind, pick(ready, key=lambda state: state.stage)
        return None

    return choose


class _Event(NamedTuple):
    """The end of an action on a rank; or, not the end, the arrival of what it sent."""

    is_end: bool
    rank: int
    state: StageState
    kind: Kind
    microbatch: int


@dataclass
class ListSchedule:
    """A step in progress, when `runs[pipe]` go through the pipes and `choose` decides."""

    placement: Sequence[Sequence[int]]
    runs: Sequence[range]
    times: StageTimes
    latency: float
    choose: Rule
    kinds: Sequence[Kind]  # F and B, or F, I and W

    def __post_init__(self) -> None:
        ranks = len(set(self.placement[0]))
        self.back: Kind = "I" if "I" in self.kinds else "B"
        self.states: dict[tuple[int, int], StageState] = {}
        self.local_stages: list[list[StageState]] = [[] for _ in range(ranks)]
        for pipe, row in enumerate(self.placement):
            for stage, rank in enumerate(row):
                state = StageState(pipe, stage, {kind: deque() for kind in self.kinds})
                self.states[pipe, stage] = state
                self.local_stages[rank].append(state)
            self.states[pipe, 0].ready["F"].extend(self.runs[pipe])
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.busy = [False] * ranks
        self.events: list[tuple[float, int, _Event]] = []  # by time; of equals the first first
        self.count = 0

    def play(self) -> list[list[Action]] | None:
        """The orders of all ranks; None when the rule leaves all waiting for each other."""
        now = 0.0
        touched = set(range(len(self.orders)))
        while touched:
            for rank in sorted(touched):
                if not self.busy[rank]:
                    self.start(now, rank)
            touched.clear()
            now = self.events[0][0] if self.events else now
            while self.events and self.events[0][0] <= now:
                time, _, event = heapq.heappop(self.events)
                self.happen(time, event)
                touched.add(event.rank)
        wanted = len(self.kinds) * len(self.placement[0]) * sum(map(len, self.runs))
        return self.orders if sum(map(len, self.orders)) == wanted else None

    def push(self, time: float, event: _Event) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def start(self, time: float, rank: int) -> None:
        """What the rule chooses for a rank that is free, if anything."""
        choice = self.choose(self.local_stages[rank])
        if choice is None:
            return
        kind, state = choice
        microbatch = state.ready[kind].popleft()
        if kind == "F":
            state.in_flight += 1
        self.orders[rank].append(Action(kind, state.pipe, state.stage, (microbatch,)))
        self.busy[rank] = True
        self.push(time + self.times[kind][state.stage], _Event(True, rank, state, kind, microbatch))

    def happen(self, time: float, event: _Event) -> None:
        """What an event makes ready, here and on the next stage."""
        rank, state, kind, microbatch = event.rank, event.state, event.kind, event.microbatch
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
            state.ready[self.back].append(microbatch)
        elif kind != "W" and target >= 0:
            there = self.placement[state.pipe][target]
            arrival = _Event(False, there, self.states[state.pipe, target], kind, microbatch)
            self.push(time + (self.latency if there != rank else 0.0), arrival)
