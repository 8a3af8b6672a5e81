"""Copies between a device and its host that overlap computation.

On a GPU they run on a separate stream, from and to pinned memory. A process on the CPU copies at
once, from memory to memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar._torch.tensors import copy_each

HOST = torch.device("cpu")


class PendingCopy:
    """Copies that may still run and the tensors that they read; without an event, they are done."""

    def __init__(self, event: torch.cuda.Event | None = None, read: Sequence[Tensor] = ()) -> None:
        self._event, self._read = event, read

    def precede(self) -> None:
        """Make later work of the device wait for the copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Block this process until the copies are done."""
        if self._event is not None:
            self._event.synchronize()
        self._read = ()


class HostLink:
    """Copies tensors between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def has_stream(self) -> bool:
        """Return whether copies overlap computation, so that an early request pays."""
        return self._stream is not None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run work on the stream of copies, after all that the device was asked for so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def upload(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> PendingCopy:
        """Copy tensors of the host, cast there to the dtypes of `targets`, into these."""
        if self._stream is None:
            copy_each(list(targets), list(sources))
            return PendingCopy()
        read = [_in_dtype(source, target.dtype) for source, target in zip(sources, targets)]
        with self.on_stream():
            for target, source in zip(targets, read):
                target.copy_(source, non_blocking=True)
            return PendingCopy(self._stream.record_event(), read)

    def download(self, source: Tensor) -> tuple[Tensor, PendingCopy]:
        """Return a copy on the host of a tensor on the device."""
        copy = torch.empty(
            source.shape, dtype=source.dtype, device=HOST, pin_memory=self._stream is not None
        )
        if self._stream is None:
            return copy.copy_(source), PendingCopy()
        with self.on_stream():
            copy.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            return copy, PendingCopy(self._stream.record_event())

    def restore(self, source: Tensor) -> tuple[Tensor, PendingCopy]:
        """Return a copy on the device of a tensor that `download` made; copies run in order."""
        copy = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        pending = self.upload([copy], [source])
        if self._stream is not None:
            copy.record_stream(self._stream)
        return copy, pending


def _in_dtype(source: Tensor, dtype: torch.dtype) -> Tensor:
    if source.dtype == dtype:
        return source
    return torch.empty(source.shape, dtype=dtype, pin_memory=True).copy_(source)
