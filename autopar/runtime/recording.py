"""Recording: when each action of a step ran, on every rank, as a trace.

    recording = pm.record(steps=3)
    ...                                  # train: the next three steps are recorded
    recording.save("measured.json.gz")   # on all ranks: rank 0 writes what each of them did

Clocks of machines differ: their ranks leave barriers at about one time, which says by how much. On
a GPU an action ends when its kernels have, which is waited for; steps take longer so.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InvalidInput
from autopar.pipeline.executor import Spans
from autopar.plan.plan import Plan
from autopar.report.trace import Event, action_event, write
from autopar.runtime.backend import Backend
from autopar.runtime.distributed import TorchBackend

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
        self._spans = {one.rank: one.record(steps, self._clock) for one in backend.runners}

    @property
    def done(self) -> int:
        """How many steps have been recorded."""
        return min(map(len, self._spans.values()), default=0)

    def _clock(self) -> float:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize(self._backend.device)
        return time.perf_counter()

    def events(self) -> list[Event]:
        """What every rank did; the same on all of them."""
        if self.done < self.steps:
            raise InvalidInput(
                "a recording is whole when its steps have been made",
                got=f"{self.done} of {self.steps} steps",
                remedy="call step() as often, or record(steps=...) fewer",
            )
        own = {place: spans[: self.steps] for place, spans in self._spans.items()}
        if not isinstance(self._backend, TorchBackend) or dist.get_world_size() == 1:
            return self._in_order(
                {rank: own[self._plan.place_of(rank)] for rank in self._ranks(own)}
            )
        offset = _offset()
        (spans,) = own.values()
        moved = [[(a, start - offset, end - offset) for a, start, end in one] for one in spans]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, moved)
        return self._in_order(dict(enumerate(told)))

    def save(self, path: str | Path) -> None:
        """Write the trace; on processes all ranks call it, and rank 0 writes."""
        found = self.events()
        if not isinstance(self._backend, TorchBackend) or dist.get_rank() == 0:
            write(path, found, "measured")

    def _ranks(self, own: dict[int, list[Spans]]) -> list[int]:
        ranks = range(self._plan.whole_mesh.size)
        return [rank for rank in ranks if self._plan.place_of(rank) in own]

    def _in_order(self, spans: dict[int, list[Spans]]) -> list[Event]:
        first = min(start for steps in spans.values() for one in steps for _, start, _ in one)
        return [
            action_event(rank, step, action, start - first, end - first)
            for rank, steps in spans.items()
            for step, one in enumerate(steps)
            for action, start, end in one
        ]


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
