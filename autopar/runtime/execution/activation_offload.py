"""Away: memory that a region keeps elsewhere from forward to backward: in pieces, or on the host.

    keeper = Keeper(move)
    away = keeper.put(values, ("tp",), on_host=True)      a piece each, on its way to the host
    away(rank)                                            the memory of one of them, joined again

The ranks of some axes that keep the same memory keep a piece each, and gather it before backward
reads it. With CUDA copies run beside the program, and each that comes back has the one before it
sent for.
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
from autopar.runtime.backends.host_copies import Copied, HostLink

Axes = tuple[str, ...]
# A movement of one row on each rank of this process, whose whole has so many elements.
MoveRows = Callable[[Movement, Sequence[Tensor], int], Sequence[Tensor]]


def local_mover(mesh: Mesh, rank: int, group_name: Callable[[Axes], str]) -> MoveRows:
    """Moves what one rank of a mesh has."""

    def move(movement: Movement, values: Sequence[Tensor], size: int) -> list[Tensor]:
        layout = Layout(movement.axes if movement.kind == "all_gather" else None)
        about = layout, (size,), mesh, rank, group_name(movement.axes)
        operator: Any
        operator, arguments = operator_call(movement, *about)
        return [EAGER[operator](values[0], *arguments)]

    return move


class ActivationOffload:
    """Keeps elsewhere what the regions of one program keep."""

    def __init__(self, move: MoveRows) -> None:
        self.move = move
        self._last: ReferenceType[OffloadedMemory] | None = None
        self._link: HostLink | None = None  # once something is kept on the host

    def begin(self) -> None:
        """A forward begins: what others keep is wanted after all of its own."""
        self._last = None

    def put(self, values: Sequence[Tensor], axes: Axes, on_host: bool) -> OffloadedMemory:
        """The memory of `values`, one for each rank of this process."""
        if on_host and self._link is None:
            self._link = HostLink(values[0].device)
        away = OffloadedMemory(self.move, values, axes, self._link if on_host else None, self._last)
        self._last = ref(away)
        return away


class OffloadedMemory:
    """The memory of one value on each rank of this process, which is not there."""

    def __init__(
        self,
        move: MoveRows,
        values: Sequence[Tensor],
        axes: Axes,
        link: HostLink | None,
        before: ReferenceType[OffloadedMemory] | None,
    ) -> None:
        """`link`: to the host, where they are kept there."""
        self._move, self._axes, self._before = move, axes, before
        self._wholes: list[Tensor] = []
        with torch.no_grad():
            pieces: Sequence[Tensor] = [_all_bytes(value) for value in values]
            self._size = pieces[0].numel()
            if axes:
                pieces = move(Movement("slice", axes, 0), pieces, self._size)
            self._pieces = [piece if link is None else HostPiece(piece, link) for piece in pieces]

    def send_for(self) -> None:
        """Have copies from the host begin."""
        for piece in self._pieces:
            if isinstance(piece, HostPiece):
                piece.send_for()

    def __call__(self, place: int) -> Tensor:
        """The bytes of one of the values."""
        if self._pieces:
            with torch.no_grad():
                pieces = [p.back() if isinstance(p, HostPiece) else p for p in self._pieces]
                gather = Movement("all_gather", self._axes, 0)
                joined = self._move(gather, pieces, self._size) if self._axes else pieces
            self._wholes, self._pieces = [*joined], []
            if self._before is not None and (before := self._before()) is not None:
                before.send_for()
        return self._wholes[place]


class HostPiece:
    """One tensor on the host, from which it comes back once."""

    def __init__(self, value: Tensor, link: HostLink) -> None:
        self._link, self._back = link, None
        self._kept, _ = link.down(value)

    _kept: Tensor | None
    _back: tuple[Tensor, Copied] | None

    def send_for(self) -> None:
        """Have the copy begin, where it runs by itself."""
        if self._link.is_beside:
            self._start()

    def back(self) -> Tensor:
        self._start()
        assert self._back is not None
        (value, copied), self._back = self._back, None
        copied.precede()
        return value

    def _start(self) -> None:
        if self._kept is not None:
            self._back, self._kept = self._link.back(self._kept), None


def _all_bytes(value: Tensor) -> Tensor:
    """All bytes that a tensor stands on."""
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    return memory.set_(value.untyped_storage())
