"""List scheduling: simulate a step with given times, each rank doing what a rule chooses next.

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
    """Track one stage of one pipe on a rank: its ready micro-batches and those in flight."""

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
    """Return a rule that tries the kinds in `order` and takes the first that is ready.

    It takes forwards of the deepest stage, backwards of the stage nearest to the input (or of the
    deepest), the oldest W. A forward may begin while its rank keeps fewer than `limit`, at least
    the number of pipes; with `tapers`, while also its stage s of p keeps fewer than p - s. With a
    reserve of 1 the deepest stage of a rank may fill it up to `limit`, the next up to one less, and
    so on: the deepest stages always advance, then those before them, and no rank waits forever.
    Without a reserve schedules are often shorter, but may deadlock.
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
        in_flight = sum(state.in_flight for state in states)

        def may_begin(state: StageState) -> bool:
            most = len(placement[0]) - state.stage if tapers else limit
            return in_flight < room[state.pipe, state.stage] and state.in_flight < most

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
    """Stand for the end of an action on a rank, or else for the arrival of its message."""

    is_end: bool
    rank: int
    state: StageState
    kind: Kind
    microbatch: int


@dataclass
class ListSchedule:
    """Simulate a step in which `runs[pipe]` go through the pipes and `choose` decides."""

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
        self.events: list[tuple[float, int, _Event]] = []  # by time, then by insertion
        self.count = 0

    def play(self) -> list[list[Action]] | None:
        """Return the orders of all ranks; None if all come to wait for each other."""
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
        """Start the action that the rule chooses for a free rank, if it chooses one."""
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
        """Make ready what an event allows, on its stage and on the next one."""
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
            receiver = self.placement[state.pipe][target]
            arrival = _Event(False, receiver, self.states[state.pipe, target], kind, microbatch)
            self.push(time + (self.latency if receiver != rank else 0.0), arrival)
