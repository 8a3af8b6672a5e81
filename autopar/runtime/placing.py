"""Placing: from a model's whole tensors to the pieces that one rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.layout import Layout
from autopar.mesh import Mesh


class Placing:
    """Cuts tensors for this rank, which stands at `rank` of `mesh`."""

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, device_mesh: DeviceMesh
    ) -> None:
        self.mesh, self.rank, self.device, self.device_mesh = mesh, rank, device, device_mesh

    def view(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece, as a view of the whole."""
        for dim, (start, length) in enumerate(
            layout.local_bounds(whole.shape, self.mesh, self.rank)
        ):
            if length != whole.shape[dim]:
                whole = whole.narrow(dim, start, length)
        return whole

    def piece(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece in memory of its own: the whole may go."""
        return in_own_memory([self.view(whole, layout).to(self.device)])[0]

    def place(self, value: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
        """This rank's piece of rank 0's `value`; all ranks place together.

        Parameters, and buffers that are cut, are DTensors.
        """
        whole = torch.empty(value.shape, dtype=dtype, device=self.device)
        if dist.get_rank() == 0:
            whole.copy_(value.detach())
        dist.broadcast(whole, src=0)
        if layout.is_replicated and not isinstance(value, nn.Parameter):
            return whole
        return self.cut(whole, layout)

    def cut(self, whole: Tensor, layout: Layout) -> DTensor:
        """A DTensor of a whole tensor that every rank has."""
        wrap = wrapper(layout, tuple(whole.shape), self.device_mesh)
        return wrap(self.piece(whole, layout))


def in_own_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same contiguous data, each in memory that holds nothing else."""
    return [
        tensor
        if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        else tensor.clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


@lru_cache(maxsize=4096)
def wrapper(
    layout: Layout, shape: tuple[int, ...], device_mesh: DeviceMesh
) -> Callable[[Tensor], DTensor]:
    """What makes a DTensor of a local tensor."""
    placements = layout.to_placements(Mesh.from_device_mesh(device_mesh))
    stride = torch.empty(shape, device="meta").stride()

    def wrap(local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    return wrap
