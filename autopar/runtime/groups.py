"""Process groups: one for each set of axes that a program moves data over."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import groups_known, world_timeout
from autopar.errors import InvalidInput
from autopar.mesh import Mesh

Axes = tuple[str, ...]


class Groups:
    """The process groups of this rank; the members of a group make it together."""

    def __init__(self, mesh: Mesh, wanted: Iterable[Axes], copies: Sequence[Sequence[int]]) -> None:
        """`copies`: for each mesh like this one, the global ranks at its places.

        torch names a group after the groups that a rank has seen before. So if the copies hold all
        ranks of the world, these make all groups together; else members make theirs alone, after
        `see_alike`.
        """
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        together = sum(map(len, copies)) == dist.get_world_size()
        for axes in sorted(set(wanted)):
            for ranks, places in itertools.product(copies, mesh.groups(axes)):
                members = [ranks[place] for place in places]
                is_member = dist.get_rank() in members
                if is_member or together:
                    group = new_group(members, use_local_synchronization=not together)
                    if is_member:
                        self._groups[axes] = group

    def name(self, axes: Axes) -> str:
        """The name under which torch's registry knows the group over `axes`."""
        return self._groups[axes].group_name

    def __getitem__(self, axes: Axes) -> dist.ProcessGroup:
        return self._groups[axes]


def new_group(ranks: Sequence[int] | None = None, **how: Any) -> Any:
    """A group that waits as long as the world does: torch would give it half an hour."""
    return dist.new_group(ranks, timeout=world_timeout(), **how)


def see_alike(device_mesh: DeviceMesh) -> None:
    """Have all ranks of a mesh see equally many groups: who saw fewer makes some for itself."""
    most = torch.tensor(groups_known(), device=device_mesh.device_type)
    for group in device_mesh.get_all_groups():
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    for _ in range(int(most) - groups_known()):
        new_group([dist.get_rank()], use_local_synchronization=True)


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
