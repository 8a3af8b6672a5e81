"""Offload activations from forward to backward: cut over ranks, or copied to the host.

    offload = ActivationOffload(move)
    memory = offload.put(values, ("tp",), on_host=True)   a piece each, on its way to the host
    memory(rank)                                          the bytes of one value, gathered again

Ranks that keep equal memory keep a piece each, and gather it before backward reads it. With CUDA
copies run beside the program, and each that returns prefetches the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from autopar.collectives import Movement, operator_call
from autopar.collectives.eager_movements import EAGER
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.runtime.backends.host_copies import HostLink, PendingCopy

Axes = tuple[str, ...]
# Moves one row on each rank of this process, of which the joined one has so many elements.
MoveRows = Callable[[Movement, Sequence[Tensor], int], Sequence[Tensor]]


def local_mover(mesh: Mesh, rank: int, group_name: Callable[[Axes], str]) -> MoveRows:
    """Return a function that moves the row of one rank of a mesh."""

    def move(movement: Movement, values: Sequence[Tensor], size: int) -> list[Tensor]:
        layout = Layout(movement.axes if movement.kind == "all_gather" else None)
        group = group_name(movement.axes)
        operator: Any
        operator, arguments = operator_call(movement, layout, (size,), mesh, rank, group)
        return [EAGER[operator](values[0], *arguments)]

    return move


class ActivationOffload:
    """Offloads the values that the regions of one program keep for backward."""

    def __init__(self, move: MoveRows) -> None:
        self.move = move
        self._last: ReferenceType[OffloadedMemory] | None = None
        self._link: HostLink | None = None  # after the first value went to the host

    def begin(self) -> None:
        """Begin a forward, whose values return before those of earlier forwards."""
        self._last = None

    def put(self, values: Sequence[Tensor], axes: Axes, *, on_host: bool) -> OffloadedMemory:
        """Offload the memory of `values`, one for each rank of this process."""
        if on_host and self._link is None:
            self._link = HostLink(values[0].device)
        link = self._link if on_host else None
        memory = OffloadedMemory(self.move, values, axes, link, self._last)
        self._last = ref(memory)
        return memory


class OffloadedMemory:
    """The offloaded memory of one value on each rank of this process."""

    def __init__(
        self,
        move: MoveRows,
        values: Sequence[Tensor],
        axes: Axes,
        link: HostLink | None,
        before: ReferenceType[OffloadedMemory] | None,
    ) -> None:
        """Cut `values` over `axes`, and copy them by `link`; None keeps them on the device.

        `before` was offloaded before this memory, and is prefetched when this one returns."""
        self._move, self._axes, self._before = move, axes, before
        self._restored: list[Tensor] = []
        with torch.no_grad():
            pieces: Sequence[Tensor] = [_all_bytes(value) for value in values]
            self._size = pieces[0].numel()
            if axes:
                pieces = move(Movement("slice", axes, 0), pieces, self._size)
            self._pieces = [piece if link is None else HostPiece(piece, link) for piece in pieces]

    def prefetch(self) -> None:
        """Begin to copy pieces from the host."""
        for piece in self._pieces:
            if isinstance(piece, HostPiece):
                piece.prefetch()

    def __call__(self, place: int) -> Tensor:
        """Return the bytes of the value at `place` among the ranks, restored at the first call."""
        if self._pieces:
            with torch.no_grad():
                pieces = [p.fetch() if isinstance(p, HostPiece) else p for p in self._pieces]
                gather = Movement("all_gather", self._axes, 0)
                joined = self._move(gather, pieces, self._size) if self._axes else pieces
            self._restored, self._pieces = [*joined], []
            if self._before is not None and (before := self._before()) is not None:
                before.prefetch()
        return self._restored[place]


class HostPiece:
    """One tensor on the host, which is fetched once."""

    def __init__(self, value: Tensor, link: HostLink) -> None:
        self._link, self._fetched = link, None
        self._host_copy, _ = link.download(value)

    _host_copy: Tensor | None
    _fetched: tuple[Tensor, PendingCopy] | None

    def prefetch(self) -> None:
        """Begin the copy, where it runs beside the program."""
        if self._link.has_stream:
            self._start()

    def fetch(self) -> Tensor:
        self._start()
        assert self._fetched is not None
        (value, copied), self._fetched = self._fetched, None
        copied.precede()
        return value

    def _start(self) -> None:
        if self._host_copy is not None:
            self._fetched, self._host_copy = self._link.restore(self._host_copy), None


def _all_bytes(value: Tensor) -> Tensor:
    """View all bytes of the storage of a tensor."""
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    return memory.set_(value.untyped_storage())
