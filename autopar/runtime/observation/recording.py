"""Recording: when each action of a step ran, on every rank, as a trace.

    recording = pm.record(steps=3)
    ...                                  # train: the next three steps are recorded
    recording.save("measured.json.gz")   # on all ranks: rank 0 writes what each of them did
    pm.plan.report("plan.html", run=recording)

A step that breaks off is none of them, and one that nobody keeps any more records nothing. Clocks
of machines differ: their ranks leave barriers at about one time, which says by how much. On a GPU
an action ends when its kernels have, which is waited for; steps take longer so. What comes after
the last action (sums of gradients that nothing hides, buffers) is one event, to the step's end.
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
from autopar.plan.plan import Plan
from autopar.plan.saved_value import digest
from autopar.report.trace import SUMS, UNHIDDEN, Event, Trace, action_event, write
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.observation.step_figures import StepFigures
from autopar.units import counted

_ROUNDS = 8  # in which clocks are compared


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
        self._recorders = {one.rank: Recorder(steps, clock) for one in backend.runners}
        for one in backend.runners:
            one.record(self._recorders[one.rank])

    @property
    def done(self) -> int:
        """How many steps have been recorded."""
        return min((len(one.steps) for one in self._recorders.values()), default=0)

    def stop(self) -> None:
        """Record no more: it is of the steps that have been made."""
        self.steps = self.done
        for one in self._recorders.values():
            one.wanted = self.steps

    def note(self, figures: StepFigures) -> None:
        """What is told of a step that has ended, if it is one of those."""
        if len(self.figures) < min(self.done, self.steps):
            self.figures.append(figures)

    def events(self) -> list[Event]:
        """What every rank did; the same on all of them, which ask the first time together."""
        if self._events is None:
            self._events = self._gathered()
        return self._events

    def _gathered(self) -> list[Event]:
        here = self._backend
        world = dist.get_world_size() if isinstance(here, TorchBackend) else 1
        told: list[Any] = [(self.done, self.steps)] * world
        if world > 1:  # before ranks wait for one another's times
            dist.all_gather_object(told, told[0])
        if len({*told}) > 1 or self.done < self.steps or not self.steps:
            counts = [f"{done} of {counted(steps, 'step')}" for done, steps in told]
            by_rank = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(counts))
            raise InvalidInput(
                "a recording is whole when its steps have been made, on all ranks as many",
                got=counts[0] if len({*counts}) == 1 else by_rank,
                remedy="call step() as often, record(steps=...) fewer, or stop() it",
            )
        own = {place: one.steps[: self.steps] for place, one in self._recorders.items()}
        if world == 1:
            return self._in_order(
                {rank: own[self._plan.place_of(rank)] for rank in self._ranks(own)}
            )
        offset = _offset()
        (steps,) = own.values()
        dist.all_gather_object(told, [_moved(one, -offset) for one in steps])
        return self._in_order(dict(enumerate(told)))

    def save(self, path: str | Path) -> None:
        """Write the trace; on processes all ranks call it, and rank 0 writes."""
        found = self.events()
        if not isinstance(self._backend, TorchBackend) or dist.get_rank() == 0:
            write(path, Trace("measured", digest(self._plan), tuple(found)))

    def _ranks(self, own: dict[int, list[StepTimes]]) -> list[int]:
        ranks = range(self._plan.whole_mesh.size)
        return [rank for rank in ranks if self._plan.place_of(rank) in own]

    def _in_order(self, times: dict[int, list[StepTimes]]) -> list[Event]:
        first = min(
            start for steps in times.values() for one in steps for _, start, _ in one.actions
        )
        found = []
        for rank, steps in times.items():
            for step, one in enumerate(_moved(step, -first) for step in steps):
                found += [action_event(rank, step, *action) for action in one.actions]
                last = one.actions[-1][2] if one.actions else one.end
                found.append(Event(rank, UNHIDDEN, last, one.end, SUMS, {"step": step}))
        return found


def _clock(device: torch.device) -> Callable[[], float]:
    """Tells the time once a device is done."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _moved(times: StepTimes, by: float) -> StepTimes:
    actions = [(action, start + by, end + by) for action, start, end in times.actions]
    return replace(times, actions=actions, end=times.end + by)


def _offset() -> float:
    """By how much the clock of this machine is ahead of that of rank 0: by the barrier that its
    slowest rank passed fastest."""
    best, offset = float("inf"), 0.0
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        dist.barrier()
        after = time.perf_counter()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (platform.node(), after, after - before))
        longest = max(took for *_, took in told)
        if longest < best:
            best, offset = longest, after - told[0][1]
    return 0.0 if told[0][0] == platform.node() else offset
