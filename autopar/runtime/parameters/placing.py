"""Place tensors: cut, read or receive the pieces that one rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, irecv, isend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autopar._torch.communication import wait_for
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.placements import from_placements, to_placements
from autopar.tensor_type import TensorType

Bounds = tuple[tuple[int, int], ...]  # start and length in each dim
ReadPart = Callable[[Bounds], Tensor]  # a part of a tensor that need not lie here in whole


class TensorPlacer:
    """Cuts tensors for this process, which is `rank` of `mesh` and computes on `device`."""

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, device_mesh: DeviceMesh
    ) -> None:
        self.mesh, self.rank, self.device, self.device_mesh = mesh, rank, device, device_mesh

    def view_piece(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's piece of a full tensor, as a view if it is one box of it."""
        return read_piece(partial(narrow_to, tensor), layout, tensor.shape, self.mesh, self.rank)

    def copy_piece(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's piece of a full tensor in memory of its own."""
        return ensure_own_memory([self.view_piece(tensor, layout).to(self.device)])[0]

    def place_part(self, like: Tensor, type_: TensorType, read: ReadPart) -> Tensor:
        """Place this rank's piece of a tensor shaped like `like`, of which `read` returns parts."""
        part = read_piece(read, type_.layout, type_.shape, self.mesh, self.rank)
        piece = ensure_own_memory([part.to(self.device, type_.dtype)])[0]
        return self._wrap(piece, like, type_.layout)

    def place_from_rank0(
        self, value: Tensor, type_: TensorType, meshes: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """Place this rank's piece of rank 0's `value`, None if it has none; all ranks take part.

        `meshes` has the ranks of each mesh like this one that holds the tensor. Rank 0 sends every
        piece once to each mesh; there it goes to the replicas, axis by axis.
        """
        this_rank, layout = dist.get_rank(), type_.layout
        is_holder = any(this_rank in ranks for ranks in meshes)
        shape = layout.local_shape(type_.shape, self.mesh, self.rank)
        piece = torch.empty(shape, dtype=type_.dtype, device=self.device)
        if layout.is_replicated and len(meshes) == 1 and len(meshes[0]) == dist.get_world_size():
            if this_rank == 0:
                piece.copy_(value.detach())
            dist.broadcast(_as_bytes(piece), src=0)
            return self._wrap(piece, value, layout)
        replicated = [axis for axis in self.mesh if axis not in layout.axes]
        firsts = [group[0] for group in self.mesh.groups(tuple(replicated))]
        if this_rank == 0:
            targets = [(ranks, at) for ranks in meshes for at in firsts]
            self._send(value.detach(), type_, targets)
            if is_holder:
                piece.copy_(self.view_piece(value.detach(), layout))
        elif is_holder and self.rank in firsts and piece.numel():
            _run_transfers([P2POp(irecv, _as_bytes(piece), 0)])
        if not is_holder:
            return None
        coordinate = self.mesh.coordinate(self.rank)
        for number, axis in enumerate(replicated):
            has_piece = not any(coordinate[later] for later in replicated[number + 1 :])
            if has_piece and self.mesh[axis] > 1 and piece.numel():
                group = self.device_mesh.get_group(axis)
                dist.broadcast(_as_bytes(piece), group=group, group_src=0)
        return self._wrap(piece, value, layout)

    def _send(
        self, tensor: Tensor, type_: TensorType, targets: Sequence[tuple[Sequence[int], int]]
    ) -> None:
        """Send pieces to other ranks, given as the ranks of a mesh and a place in it."""
        pieces: dict[int, Tensor] = {}
        sends = []
        for ranks, at in targets:
            if ranks[at] == dist.get_rank():
                continue
            if at not in pieces:
                read = partial(narrow_to, tensor)
                part = read_piece(read, type_.layout, type_.shape, self.mesh, at)
                pieces[at] = part.to(self.device, type_.dtype).contiguous()
            if pieces[at].numel():
                sends.append(P2POp(isend, _as_bytes(pieces[at]), ranks[at]))
        _run_transfers(sends)

    def _wrap(self, piece: Tensor, like: Tensor, layout: Layout) -> Tensor:
        """Make a DTensor of a piece of a parameter, or of a buffer that is cut."""
        if layout.is_replicated and not isinstance(like, nn.Parameter):
            return piece
        return dtensor_wrapper(layout, tuple(like.shape), self.device_mesh)(piece)

    def place_tensor(self, tensor: Tensor, layout: Layout) -> DTensor:
        """Make a DTensor of a full tensor that every rank has."""
        wrap = dtensor_wrapper(layout, tuple(tensor.shape), self.device_mesh)
        return wrap(self.copy_piece(tensor, layout))


def local_boxes(value: Tensor) -> tuple[list[Bounds], int]:
    """Return the boxes of a tensor that this process holds, and the dim along which they join."""
    if not isinstance(value, DTensor):
        return [tuple((0, size) for size in value.shape)], 0
    return _boxes_on_rank(value.device_mesh, value.placements, value.shape)


@lru_cache(maxsize=4096)
def _boxes_on_rank(
    device_mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> tuple[list[Bounds], int]:
    mesh, coordinate = Mesh.from_device_mesh(device_mesh), device_mesh.get_coordinate()
    assert coordinate is not None
    layout = from_placements(placements, mesh, len(shape))
    layout.validate(shape, mesh)
    boxes = layout.boxes(shape, mesh, mesh.rank(dict(zip(mesh.names, coordinate))))
    return boxes, layout.parts[0][0] if layout.parts else 0


def read_piece(
    read: ReadPart, layout: Layout, shape: Sequence[int], mesh: Mesh, rank: int
) -> Tensor:
    """Return a rank's piece of a tensor of which `read` returns parts."""
    boxes = [read(bounds) for bounds in layout.boxes(shape, mesh, rank)]
    return torch.cat(boxes, layout.parts[0][0]) if layout.parts else boxes[0]


def is_sharded(value: Tensor) -> bool:
    """Return whether a tensor is a DTensor of which ranks hold pieces or terms of a sum."""
    return isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)


def narrow_to(tensor: Tensor, bounds: Bounds) -> Tensor:
    """View the part of a tensor inside some bounds."""
    for dim, (start, length) in enumerate(bounds):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: not every backend moves every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _run_transfers(moves: Sequence[P2POp]) -> None:
    for work in dist.batch_isend_irecv(list(moves)) if moves else ():
        wait_for(work)


def ensure_own_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors contiguous, each in memory that holds nothing else, copied if needed."""
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
    """Return a function that makes a DTensor of a local tensor with this layout."""
    placements = to_placements(layout, Mesh.from_device_mesh(device_mesh))
    stride = torch.empty(shape, device="meta").stride()

    def wrap(local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    return wrap


def is_convertible(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether stored numbers may fill a tensor of another dtype.

    Only floating-point numbers, and complex ones, may change their precision."""
    both_float = stored.is_floating_point and target.is_floating_point
    return stored == target or both_float or (stored.is_complex and target.is_complex)
