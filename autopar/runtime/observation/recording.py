"""Recording: when each action of a step ran, on every rank, as a trace.

    recording = pm.record(steps=3)
    ...                                  # train: the next three steps are recorded
    recording.save("measured.json.gz")   # on all ranks: rank 0 writes what each of them did
    pm.plan.report("plan.html", run=recording)

Steps that break off do not count, and a recording without references records nothing more. Clocks
of machines differ; barriers, which ranks leave at about one time, show by how much. On a GPU an
action ends when its kernels have ended. Waiting for them makes steps slower. Gathers of parameters
and sums of gradients are events of their own, hidden or not: from when they begin to when the ranks
have exchanged their data (on a GPU, to when they are waited for). The work after the last action is
one event, to the step's end.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InvalidInput
from autopar.pipeline.running.executor import Recorder, StepTimes
from autopar.pipeline.running.movement_spans import MovementSpan
from autopar.plans.plan import Plan
from autopar.plans.saved_value import digest
from autopar.report.trace import SUMS, UNHIDDEN, Event, Trace, action_event, movement_events, write
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.observation.step_figures import StepFigures
from autopar.text.units import counted

_ROUNDS = 8  # barriers by which clocks are compared


class Recording:
    """The times of the next steps of a parallel module."""

    def __init__(self, backend: Backend, plan: Plan, steps: int) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise InvalidInput(
                "a recording is of a whole number of steps, at least 1",
                got=f"steps={steps!r}",
                remedy="pm.record(steps=3)",
            )
        self.steps, self._backend, self._plan = steps, backend, plan
        self.figures: list[StepFigures] = []
        self._events: list[Event] | None = None
        clock = _clock(backend.device)
        self._recorders = {runner.rank: Recorder(steps, clock) for runner in backend.runners}
        for runner in backend.runners:
            runner.record(self._recorders[runner.rank])

    @property
    def done(self) -> int:
        """Return the number of steps that have been recorded."""
        return min((len(recorder.steps) for recorder in self._recorders.values()), default=0)

    def stop(self) -> None:
        """Record no further steps: the recording is complete with the steps so far."""
        self.steps = self.done
        for recorder in self._recorders.values():
            recorder.wanted = self.steps

    def add_figures(self, figures: StepFigures) -> None:
        """Keep the figures of a step that has ended, if it is a recorded one."""
        if len(self.figures) < min(self.done, self.steps):
            self.figures.append(figures)

    def events(self) -> list[Event]:
        """Return the events of every rank, the same on all; their first call is common."""
        if self._events is None:
            self._events = self._gather_events()
        return self._events

    def _gather_events(self) -> list[Event]:
        backend = self._backend
        world = dist.get_world_size() if isinstance(backend, TorchBackend) else 1
        from_ranks: list[Any] = [(self.done, self.steps)] * world
        if world > 1:  # refuse before ranks wait for one another's times
            dist.all_gather_object(from_ranks, from_ranks[0])
        if len({*from_ranks}) > 1 or self.done < self.steps or not self.steps:
            counts = [f"{done} of {counted(steps, 'step')}" for done, steps in from_ranks]
            by_rank = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(counts))
            raise InvalidInput(
                "a recording is whole when its steps have been made, on all ranks as many",
                got=counts[0] if len({*counts}) == 1 else by_rank,
                remedy="call step() as often, record(steps=...) fewer, or stop() it",
            )
        local_times = {
            place: recorder.steps[: self.steps] for place, recorder in self._recorders.items()
        }
        if world == 1:
            return self._ordered_events(
                {
                    rank: local_times[self._plan.place_of(rank)]
                    for rank in self._ranks_with(local_times)
                }
            )
        offset = _clock_offset()
        (steps,) = local_times.values()
        dist.all_gather_object(from_ranks, [_shifted(step, -offset) for step in steps])
        return self._ordered_events(dict(enumerate(from_ranks)))

    def save(self, path: str | Path) -> None:
        """Write the trace as a file; on processes all ranks call this, and rank 0 writes."""
        events = self.events()
        if not isinstance(self._backend, TorchBackend) or dist.get_rank() == 0:
            write(path, Trace("measured", digest(self._plan), tuple(events)))

    def _ranks_with(self, times: dict[int, list[StepTimes]]) -> list[int]:
        ranks = range(self._plan.whole_mesh.size)
        return [rank for rank in ranks if self._plan.place_of(rank) in times]

    def _ordered_events(self, times: dict[int, list[StepTimes]]) -> list[Event]:
        start_of_first = min(
            start
            for steps in times.values()
            for step_times in steps
            for _, start, _ in step_times.actions
        )
        events = []
        for rank, steps in times.items():
            for step, step_times in enumerate(_shifted(step, -start_of_first) for step in steps):
                events += [action_event(rank, step, *action) for action in step_times.actions]
                events += movement_events(rank, step, step_times.movements)
                last = step_times.actions[-1][2] if step_times.actions else step_times.end
                events.append(Event(rank, UNHIDDEN, last, step_times.end, SUMS, {"step": step}))
        return events


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that reads the time once a device has finished its work."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _shifted(times: StepTimes, seconds: float) -> StepTimes:
    actions = [(action, start + seconds, end + seconds) for action, start, end in times.actions]
    movements = [
        MovementSpan(span.name, span.start + seconds, span.end + seconds)
        for span in times.movements
    ]
    return replace(times, actions=actions, movements=movements, end=times.end + seconds)


def _clock_offset() -> float:
    """Return the seconds by which this machine's clock is ahead of rank 0's.

    Clocks are compared after the barrier whose slowest rank was fastest.
    """
    best, offset = float("inf"), 0.0
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        dist.barrier()
        after = time.perf_counter()
        clocks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(clocks, (platform.node(), after, after - before))
        slowest = max(seconds for *_, seconds in clocks)
        if slowest < best:
            best, offset = slowest, after - clocks[0][1]
    return 0.0 if clocks[0][0] == platform.node() else offset
