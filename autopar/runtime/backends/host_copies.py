"""The way between a device and its host: copies that run beside computing.

On a GPU they have a stream of their own, and pinned memory on the host. A process on the CPU makes
them at once: there both sides are the same memory, and a copy takes room on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar._torch.tensors import copy_each

HOST = torch.device("cpu")


class Copied:
    """Copies that may still be under way, and what they read."""

    def __init__(self, event: torch.cuda.Event | None = None, read: Sequence[Tensor] = ()) -> None:
        self._event, self._read = event, read

    def precede(self) -> None:
        """What the device computes from now on comes after them."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Until they are made."""
        if self._event is not None:
            self._event.synchronize()
        self._read = ()


class HostLink:
    """Between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_beside(self) -> bool:
        """Whether copies run by themselves, so that one is worth being asked for ahead."""
        return self._stream is not None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is done in here comes after what was asked of the device so far, and nothing else
        waits for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def up(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Copied:
        """Copy from the host into tensors on the device; the host casts, so that the smaller dtype
        crosses."""
        if self._stream is None:
            copy_each(list(targets), list(sources))
            return Copied()
        read = [_in_dtype(source, target.dtype) for source, target in zip(sources, targets)]
        with self.beside():
            for target, source in zip(targets, read):
                target.copy_(source, non_blocking=True)
            return Copied(self._stream.record_event(), read)

    def down(self, source: Tensor) -> tuple[Tensor, Copied]:
        """A copy on the host of a tensor on the device."""
        copy = torch.empty(
            source.shape, dtype=source.dtype, device=HOST, pin_memory=self._stream is not None
        )
        if self._stream is None:
            return copy.copy_(source), Copied()
        with self.beside():
            copy.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            return copy, Copied(self._stream.record_event())

    def back(self, kept: Tensor) -> tuple[Tensor, Copied]:
        """A copy on the device of what `down` made; copies are made in the order asked for."""
        copy = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        copied = self.up([copy], [kept])
        if self._stream is not None:
            copy.record_stream(self._stream)
        return copy, copied


def _in_dtype(source: Tensor, dtype: torch.dtype) -> Tensor:
    if source.dtype == dtype:
        return source
    return torch.empty(source.shape, dtype=dtype, pin_memory=True).copy_(source)
