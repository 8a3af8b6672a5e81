"""Movement spans: when gathers and sums that run beside actions begin and end, in a recorded step.

    span = begin("sum of layers.0.weight")     # None if the step is not recorded
    span.watch(work)                           # notes when the work ends, if it can tell
    work.wait()
    span.finish()                              # else it has ended now

A work on a GPU ends for its process when it has been issued, so there a span ends with the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class MovementSpan:
    """Hold the times of one gather or sum; `end` is that of the latest of its works."""

    name: str
    start: float
    end: float = 0.0
    _running: int = field(default=0, repr=False)  # works that will tell when they end

    def watch(self, works: Sequence[Any]) -> None:
        """Note when these works end, those of `torch.distributed` on a host."""
        for work in works:
            try:
                future = work.get_future()
            except (AttributeError, RuntimeError):  # messages have none
                continue
            self._running += 1
            future.add_done_callback(self._has_ended)

    def _has_ended(self, _: Any) -> None:
        self.end = max(self.end, time.perf_counter())
        self._running -= 1

    def finish(self) -> None:
        """Note that the movement has been waited for."""
        if not self.end or self._running:
            self.end = time.perf_counter()


Begin = Callable[[str], MovementSpan | None]


def not_recorded(name: str) -> None:
    """Return no span."""


class Mover(Protocol):
    """Moves data beside actions, and asks `begin` for the span of each movement."""

    begin: Begin


@contextmanager
def listening(begin: Begin, *movers: Mover) -> Iterator[None]:
    """Give the spans that `begin` returns to movers for as long as the context lasts."""
    for mover in movers:
        mover.begin = begin
    try:
        yield
    finally:
        for mover in movers:
            mover.begin = not_recorded


def names_text(names: Sequence[str]) -> str:
    """Return the first of some parameters, and how many follow."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
