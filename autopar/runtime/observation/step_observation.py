"""Watched: what a parallel module tells of its steps: figures, memory by kind, times of actions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.plan.plan import Plan
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.observation.memory_in_use import MemoryUse, MemoryWatch, held_by, here, use_of
from autopar.runtime.observation.recording import Recording
from autopar.runtime.observation.step_figures import Callback, Listeners, StepFigures


class Watched(nn.Module):
    """Of a module with a plan and a backend."""

    plan: Plan
    backend: Backend
    _peak: int | None  # bytes of all but an optimizer's, where they were watched
    _listeners: Listeners

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryUse:
        """The bytes that this process's ranks hold now, by kind, beside the plan's; prints as a
        table, and `memory()[rank]["parameters"].held` is a number.

        `optimizer`: whose states are counted. The peak is that of `watching_memory`; on a GPU it is
        known always. On the virtual mesh, where ranks share memory, pieces are counted by layouts.
        """
        return use_of(self, self.plan, self.backend, optimizer, self._peak)

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Follow torch's allocator inside, for the peak that `memory()` tells.

        On a CPU by a profiler, which slows what runs, and does not see what is let go inside that
        was there before (call `zero_grad()` outside); on the virtual mesh, where all ranks share
        the memory of one process, none of them has a peak.
        """
        held = held_by(self, self.backend, None)
        before = sum(size or 0 for size in here(held, self.backend.device).values())
        with MemoryWatch(self.backend.device) as watch:
            yield
        if watch.most is not None and isinstance(self.backend, TorchBackend):
            self._peak = before + watch.most

    def record(self, steps: int = 1) -> Recording:
        """Record when each action of the next `steps` runs, on every rank: once they are made,
        `save(path)` writes a trace, and `pm.plan.report(path, run=...)` shows them. Of the program
        that was planned; a step with `outputs=True` is another's."""
        recording = Recording(self.backend, self.plan, steps)

        kept = weakref.ref(recording)

        def note(figures: StepFigures) -> None:
            if (one := kept()) is not None:
                one.note(figures)
            if one is None or len(one.figures) >= one.steps:
                remove()

        remove = self.on_step(note)
        return recording

    def on_step(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with the `StepFigures` of each step, on every rank; what is given takes
        it away again. `ap.ProgressLine()`, `ap.JsonLines(path)` and `ap.TensorBoard(writer)` are
        such."""
        return self._listeners.add(callback)
