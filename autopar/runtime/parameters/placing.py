"""Placing: from whole tensors to the pieces that one rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, irecv, isend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch.communication import wait_for
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.placements import from_placements, to_placements

Bounds = tuple[tuple[int, int], ...]  # start and length in each dim
ReadPart = Callable[[Bounds], Tensor]  # a part of a tensor that need not lie here in whole


class TensorPlacer:
    """Cuts tensors for this rank, which stands at `rank` of `mesh`."""

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, device_mesh: DeviceMesh
    ) -> None:
        self.mesh, self.rank, self.device, self.device_mesh = mesh, rank, device, device_mesh

    def view(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece, as a view of the whole, if it is one of its pieces."""
        return read_piece(partial(narrow_to, whole), layout, whole.shape, self.mesh, self.rank)

    def piece(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece in memory of its own: the whole may go."""
        return ensure_own_memory([self.view(whole, layout).to(self.device)])[0]

    def read(self, like: Tensor, type_: TensorType, read: ReadPart) -> Tensor:
        """This rank's piece of a tensor of which `read` gives a part."""
        part = read_piece(read, type_.layout, type_.shape, self.mesh, self.rank)
        piece = ensure_own_memory([part.to(self.device, type_.dtype)])[0]
        return self._wrapped(piece, like, type_.layout)

    def receive(
        self, value: Tensor, type_: TensorType, copies: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """This rank's piece of rank 0's `value`, if it holds one; all ranks take part.

        `copies`: the ranks at the places of each mesh like this one that holds the tensor. Rank 0
        sends every piece to each of these once; from there it goes to the replicas, axis by axis.
        """
        here, layout = dist.get_rank(), type_.layout
        mine = next((ranks for ranks in copies if here in ranks), None)
        shape = layout.local_shape(type_.shape, self.mesh, self.rank)
        piece = torch.empty(shape, dtype=type_.dtype, device=self.device)
        if layout.is_replicated and len(copies) == 1 and len(copies[0]) == dist.get_world_size():
            if here == 0:
                piece.copy_(value.detach())
            dist.broadcast(_as_bytes(piece), src=0)
            return self._wrapped(piece, value, layout)
        replicated = [axis for axis in self.mesh if axis not in layout.axes]
        firsts = [group[0] for group in self.mesh.groups(tuple(replicated))]
        if here == 0:
            self._send(value.detach(), type_, [(ranks, at) for ranks in copies for at in firsts])
            if mine is not None:
                piece.copy_(self.view(value.detach(), layout))
        elif mine is not None and self.rank in firsts and piece.numel():
            _run_transfers([P2POp(irecv, _as_bytes(piece), 0)])
        if mine is None:
            return None
        place = self.mesh.coordinate(self.rank)
        for number, axis in enumerate(replicated):
            is_there = not any(place[later] for later in replicated[number + 1 :])
            if is_there and self.mesh[axis] > 1 and piece.numel():
                group = self.device_mesh.get_group(axis)
                dist.broadcast(_as_bytes(piece), group=group, group_src=0)
        return self._wrapped(piece, value, layout)

    def _send(
        self, whole: Tensor, type_: TensorType, to: Sequence[tuple[Sequence[int], int]]
    ) -> None:
        """Send the pieces of places to other ranks, each made once."""
        pieces: dict[int, Tensor] = {}
        sends = []
        for ranks, at in to:
            if ranks[at] == dist.get_rank():
                continue
            if at not in pieces:
                read = partial(narrow_to, whole)
                part = read_piece(read, type_.layout, type_.shape, self.mesh, at)
                pieces[at] = part.to(self.device, type_.dtype).contiguous()
            if pieces[at].numel():
                sends.append(P2POp(isend, _as_bytes(pieces[at]), ranks[at]))
        _run_transfers(sends)

    def _wrapped(self, piece: Tensor, like: Tensor, layout: Layout) -> Tensor:
        """Parameters, and buffers that are cut, are DTensors."""
        if layout.is_replicated and not isinstance(like, nn.Parameter):
            return piece
        return dtensor_wrapper(layout, tuple(like.shape), self.device_mesh)(piece)

    def cut(self, whole: Tensor, layout: Layout) -> DTensor:
        """A DTensor of a whole tensor that every rank has."""
        wrap = dtensor_wrapper(layout, tuple(whole.shape), self.device_mesh)
        return wrap(self.piece(whole, layout))


def local_boxes(value: Tensor) -> tuple[list[Bounds], int]:
    """What this process has of a tensor: of a DTensor its piece, which may be several pieces of the
    whole, one after the other along a dim."""
    if not isinstance(value, DTensor):
        return [tuple((0, size) for size in value.shape)], 0
    mesh, place = Mesh.from_device_mesh(value.device_mesh), value.device_mesh.get_coordinate()
    assert place is not None
    layout = from_placements(value.placements, mesh, value.ndim)
    layout.validate(value.shape, mesh)
    boxes = layout.boxes(value.shape, mesh, mesh.rank(dict(zip(mesh.names, place))))
    return boxes, layout.parts[0][0] if layout.parts else 0


def read_piece(
    read: ReadPart, layout: Layout, shape: Sequence[int], mesh: Mesh, rank: int
) -> Tensor:
    """What a rank holds of a tensor of which `read` gives parts."""
    found = [read(bounds) for bounds in layout.boxes(shape, mesh, rank)]
    return torch.cat(found, layout.parts[0][0]) if layout.parts else found[0]


def is_sharded(value: Tensor) -> bool:
    """Whether ranks hold pieces of it, of which a whole one is to be made."""
    return isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)


def narrow_to(whole: Tensor, bounds: Bounds) -> Tensor:
    """A view of what lies inside some bounds."""
    for dim, (start, length) in enumerate(bounds):
        if length != whole.shape[dim]:
            whole = whole.narrow(dim, start, length)
    return whole


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: not every backend moves every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _run_transfers(moves: Sequence[P2POp]) -> None:
    for work in dist.batch_isend_irecv(list(moves)) if moves else ():
        wait_for(work)


def ensure_own_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same contiguous data, each in memory that holds nothing else."""
    return [
        tensor
        if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        else tensor.clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


@lru_cache(maxsize=4096)
def dtensor_wrapper(
    layout: Layout, shape: tuple[int, ...], device_mesh: DeviceMesh
) -> Callable[[Tensor], DTensor]:
    """What makes a DTensor of a local tensor."""
    placements = to_placements(layout, Mesh.from_device_mesh(device_mesh))
    stride = torch.empty(shape, device="meta").stride()

    def wrap(local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    return wrap


def is_convertible(stored: torch.dtype, kept: torch.dtype) -> bool:
    """Return whether numbers that were stored may take the place of those of another dtype: only
    floating-point numbers, and complex ones, come in another precision."""
    both_float = stored.is_floating_point and kept.is_floating_point
    return stored == kept or both_float or (stored.is_complex and kept.is_complex)
