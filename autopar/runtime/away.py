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
from functools import cache
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from autopar.collectives import Movement, operator_call
from autopar.collectives.eager import EAGER
from autopar.layout import Layout
from autopar.mesh import Mesh

Axes = tuple[str, ...]
# A movement of one row on each rank of this process, whose whole has so many elements.
Move = Callable[[Movement, Sequence[Tensor], int], Sequence[Tensor]]


def mover(mesh: Mesh, rank: int, group_name: Callable[[Axes], str]) -> Move:
    """Moves what one rank of a mesh has."""

    def move(movement: Movement, values: Sequence[Tensor], size: int) -> list[Tensor]:
        layout = Layout(movement.axes if movement.kind == "all_gather" else None)
        about = layout, (size,), mesh, rank, group_name(movement.axes)
        operator, arguments = operator_call(movement, *about)
        return [EAGER[operator](values[0], *arguments)]

    return move


class Keeper:
    """Keeps elsewhere what the regions of one program keep."""

    def __init__(self, move: Move) -> None:
        self.move = move
        self._last: ReferenceType[Away] | None = None

    def begin(self) -> None:
        """A forward begins: what others keep is wanted after all of its own."""
        self._last = None

    def put(self, values: Sequence[Tensor], axes: Axes, on_host: bool) -> Away:
        """The memory of `values`, one for each rank of this process."""
        away = Away(self.move, values, axes, on_host, self._last)
        self._last = ref(away)
        return away


class Away:
    """The memory of one value on each rank of this process, which is not there."""

    def __init__(
        self,
        move: Move,
        values: Sequence[Tensor],
        axes: Axes,
        on_host: bool,
        before: ReferenceType[Away] | None,
    ) -> None:
        self._move, self._axes, self._before = move, axes, before
        self._wholes: list[Tensor] = []
        with torch.no_grad():
            pieces: Sequence[Tensor] = [_memory(value) for value in values]
            self._size = pieces[0].numel()
            if axes:
                pieces = move(Movement("slice", axes, 0), pieces, self._size)
            self._pieces = [OnHost(piece) if on_host else piece for piece in pieces]

    def send_for(self) -> None:
        """Have copies from the host begin, where they run by themselves."""
        for piece in self._pieces:
            if isinstance(piece, OnHost):
                piece.send_for()

    def __call__(self, place: int) -> Tensor:
        """The bytes of one of the values."""
        if self._pieces:
            with torch.no_grad():
                pieces = [p.back() if isinstance(p, OnHost) else p for p in self._pieces]
                gather = Movement("all_gather", self._axes, 0)
                joined = self._move(gather, pieces, self._size) if self._axes else pieces
            self._wholes, self._pieces = [*joined], []
            if self._before is not None and (before := self._before()) is not None:
                before.send_for()
        return self._wholes[place]


class OnHost:
    """One tensor on the host, whose device knows when it has come there and back."""

    def __init__(self, value: Tensor) -> None:
        self._device, self._value = value.device, None
        if not value.is_cuda:
            self._kept = value.clone()
            return
        beside, now = _beside(value.device), torch.cuda.current_stream(value.device)
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            self._kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._kept.copy_(value, non_blocking=True)
        value.record_stream(beside)

    _value: Tensor | None
    _kept: Tensor | None
    _come: Any = None

    def send_for(self) -> None:
        if self._kept is not None and self._device.type == "cuda":
            with torch.cuda.stream(_beside(self._device)):
                self._value = self._kept.to(self._device, non_blocking=True)
                self._come = torch.cuda.current_stream(self._device).record_event()
            self._kept = None

    def back(self) -> Tensor:
        self.send_for()
        value, kept = self._value, self._kept
        self._value = self._kept = None
        if value is None:
            assert kept is not None
            return kept.clone()
        now = torch.cuda.current_stream(self._device)
        now.wait_event(self._come)
        value.record_stream(now)
        return value


@cache
def _beside(device: torch.device) -> Any:
    """The stream of copies to and from the host."""
    return torch.cuda.Stream(device)


def _memory(value: Tensor) -> Tensor:
    """All bytes that a tensor stands on."""
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    return memory.set_(value.untyped_storage())
