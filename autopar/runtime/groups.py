"""Process groups: one for each set of axes that a program moves data over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from autopar.errors import InvalidInput
from autopar.mesh import Mesh

Axes = tuple[str, ...]


class Groups:
    """The process groups of this rank; the members of a group make it together."""

    def __init__(self, mesh: Mesh, wanted: Iterable[Axes], ranks: Sequence[int]) -> None:
        """`ranks`: the global rank that stands at each place of the mesh."""
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        for axes in sorted(set(wanted)):
            for places in mesh.groups(axes):
                members = [ranks[place] for place in places]
                if dist.get_rank() in members:
                    self._groups[axes] = dist.new_group(members, use_local_synchronization=True)

    def name(self, axes: Axes) -> str:
        """The name under which torch's registry knows the group over `axes`."""
        return self._groups[axes].group_name

    def __getitem__(self, axes: Axes) -> dist.ProcessGroup:
        return self._groups[axes]


def enter_world() -> torch.device:
    """Make sure that this process is a rank of a world; its device."""
    if not dist.is_available() or not (dist.is_initialized() or dist.is_torchelastic_launched()):
        raise InvalidInput(
            'backend="torch" runs under torch.distributed',
            got="a single process without a process group",
            remedy='start it with torchrun, or use backend="virtual"',
        )
    device = _own_device()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def join_world(mesh: Mesh) -> torch.device:
    """Make sure that this process is a rank of a world as large as `mesh`; its device."""
    device = enter_world()
    if dist.get_world_size() != mesh.size:
        raise InvalidInput(
            "a mesh has as many ranks as the world",
            got=f"{mesh} with {mesh.size} ranks in a world of {dist.get_world_size()}",
            remedy=f"torchrun --nproc-per-node {mesh.size} on one machine, or another mesh",
        )
    return device


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(local_rank)
    return local_rank
