"""Step observation: the methods of a parallel module for figures, memory and times of its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.plans.plan import Plan
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.observation.memory_in_use import (
    MemoryUse,
    MemoryWatch,
    local_bytes,
    local_tensors,
    memory_use,
)
from autopar.runtime.observation.recording import Recording
from autopar.runtime.observation.step_figures import Callback, StepFigures, StepListeners


class StepObservation(nn.Module):
    """A module with a plan and a backend whose memory, actions and steps can be observed."""

    plan: Plan
    backend: Backend
    _peak: int | None  # bytes without an optimizer's; None until they were watched
    _listeners: StepListeners

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryUse:
        """Return the bytes that this process's ranks hold now, by kind, next to the plan's.

        Prints as a table; `memory()[rank]["parameters"].held` is a number. `optimizer`: the one
        whose states are counted. The peak is that of `watching_memory`, on a GPU always known. On
        the virtual mesh, where ranks share memory, pieces are counted by layouts.
        """
        return memory_use(self, self.plan, self.backend, optimizer, self._peak)

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Follow torch's allocator inside, for the peak that `memory()` reports.

        On a CPU a profiler does this. It slows the program, and does not see the release of tensors
        from before (call `zero_grad()` outside). On the virtual mesh, where all ranks share the
        memory of one process, no rank has a peak.
        """
        held = local_tensors(self, self.backend, None)
        before = sum(size or 0 for size in local_bytes(held, self.backend.device).values())
        with MemoryWatch(self.backend.device) as watch:
            yield
        if watch.most is not None and isinstance(self.backend, TorchBackend):
            self._peak = before + watch.most

    def record(self, steps: int = 1) -> Recording:
        """Record when each action of the next `steps` runs, on every rank.

        Afterwards `save(path)` writes a trace, and `pm.plan.report(path, run=...)` shows the steps.
        Only steps of the planned program count, not those with `outputs=True`."""
        recording = Recording(self.backend, self.plan, steps)
        reference = weakref.ref(recording)

        def note(figures: StepFigures) -> None:
            if (live := reference()) is not None:
                live.add_figures(figures)
            if live is None or len(live.figures) >= live.steps:
                remove()

        remove = self.on_step(note)
        return recording

    def on_step(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with the `StepFigures` of each step; return a function that removes it.

        Every rank calls it. `ap.ProgressLine()`, `ap.JsonLines(path)` and `ap.TensorBoard(writer)`
        are callbacks."""
        return self._listeners.add(callback)
