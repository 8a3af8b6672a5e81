"""Private events of torch's profiler by which its allocator on CPUs is followed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_bool
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Makes the allocator count what all threads free, and not those alone that a profiler follows.
_counts_all_threads = c_bool.in_dll(CDLL(torch._C.__file__), "FLAGS_caffe2_report_cpu_memory_usage")


class AllocatorProfile:
    """Follows torch's allocator on the CPU in a `with`, for the peak of its bytes.

    Threads of process groups count: they are often the last to hold what was sent.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> None:
        self._counted_before = _counts_all_threads.value
        _counts_all_threads.value = True
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        _counts_all_threads.value = self._counted_before

    @property
    def peak(self) -> int:
        """Return the most bytes that were allocated at a time, beyond those before the `with`."""
        assert self._profile.profiler is not None
        events = self._profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
        changes = [event for event in _all_events(events) if event.name == "[memory]"]
        changes.sort(key=lambda event: event.start_time_ns)
        totals = [change.extra_fields.total_allocated for change in changes]
        if not totals:
            return 0
        before = totals[0] - changes[0].extra_fields.alloc_size
        return max(before, *totals) - before


def _all_events(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all_events(event.children)
