"""Process groups: one for each set of axes that a program moves data over; which GPU is whose."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch.communication import moves_host_tensors, moves_through_host
from autopar._torch.process_groups import named_group_count
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.runtime.backends.world import new_group, require_living, world
from autopar.runtime.launching.failures import report_uncaught_errors, stop_all_on_failure
from autopar.text.source_lines import frames_to_caller
from autopar.text.units import counted


class Groups:
    """The process groups of this rank; the members of a group make it together."""

    def __init__(
        self,
        mesh: Mesh,
        wanted: Iterable[Axes],
        copies: Sequence[Sequence[int]],
        purpose: str = "",
    ) -> None:
        """`copies`: for each mesh like this one, the global ranks at its places.

        torch names a group after the groups that a rank has seen before. So if the copies hold all
        ranks of the world, these make all groups together; else members make theirs alone, after
        `see_alike`.
        """
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        here = world()
        together = sum(map(len, copies)) == here.size
        for axes in sorted(set(wanted)):
            for ranks, places in itertools.product(copies, mesh.groups(axes)):
                members = [ranks[place] for place in places]
                if together or here.rank in members:
                    group = here.group_of(members, together, purpose)
                    if group is not None:
                        self._groups[axes] = group

    def name(self, axes: Axes) -> str:
        """The name under which torch's registry knows the group over `axes`."""
        return self._groups[axes].group_name

    def __getitem__(self, axes: Axes) -> dist.ProcessGroup:
        return self._groups[axes]


def see_alike(device_mesh: DeviceMesh) -> None:
    """Have all ranks of a mesh see equally many groups: who saw fewer makes some for itself."""
    most = torch.tensor(named_group_count(), device=device_mesh.device_type)
    for group in device_mesh.get_all_groups():
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    for _ in range(int(most) - named_group_count()):
        new_group([dist.get_rank()], use_local_synchronization=True)


def enter_world(model_device: torch.device) -> torch.device:
    """Make sure that this process is a rank of a world; the device that it computes on."""
    require_living()
    if not dist.is_available() or not (dist.is_initialized() or dist.is_torchelastic_launched()):
        raise InvalidInput(
            'backend="torch" runs under torch.distributed',
            got="a single process without a process group",
            remedy='start it with torchrun, or use backend="virtual"',
        )
    device = _own_device(model_device)
    if not dist.is_initialized():
        # What is kept on the host of a GPU is moved there, where it must be, over gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    here = world()
    report_uncaught_errors()
    with stop_all_on_failure(agreed=True):
        here.meet()
    return device


def require_host_moves(group: Any) -> None:
    """Refuse a world that moves only what is on GPUs, where tensors are kept on the host."""
    if not moves_host_tensors(group):
        raise InvalidInput(
            "ranks that keep states on the host belong to a world that moves tensors there too",
            got="a world that was joined for GPUs alone",
            remedy='init_process_group("cpu:gloo,cuda:nccl"), or none before parallelize()',
        )


def require_world_of(mesh: Mesh) -> None:
    """Refuse a mesh that is not as large as the world."""
    if dist.get_world_size() != mesh.size:
        raise InvalidInput(
            "a mesh has as many ranks as the world",
            got=f"{mesh} with {counted(mesh.size, 'rank')} in a world of {dist.get_world_size()}",
            remedy=f"torchrun --nproc-per-node {mesh.size} on one machine, or another mesh",
        )


def _own_device(model_device: torch.device) -> torch.device:
    """This rank's GPU, or the CPU.

    A GPU that was chosen by `torch.cuda.set_device` is kept. In a world over gloo a rank computes
    where its model is: so several ranks may share a GPU.
    """
    by_host = dist.group.WORLD is not None and moves_through_host(dist.group.WORLD)
    if not torch.cuda.is_available() or (by_host and model_device.type == "cpu"):
        return torch.device("cpu")
    index = model_device.index if by_host else None
    if index is None:
        index = torch.cuda.current_device() or _gpu_by_rank(torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _gpu_by_rank(count: int) -> int:
    """The GPU of this rank on its machine, when nobody has chosen one."""
    local, ranks_here = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if count == 1:  # the only one, or the only one that this rank was shown
        return 0
    if int(ranks_here) > count:
        raise InvalidInput(
            "each rank has a GPU of its own",
            got=f"{ranks_here} ranks on a machine with {counted(count, 'GPU')}",
            remedy=f"torchrun --nproc-per-node {count}; or, for ranks that share GPUs, "
            'init_process_group("gloo") and a model on its GPU before parallelize()',
        )
    if local is not None:
        return int(local) % count
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    warnings.warn(
        f"LOCAL_RANK is not set: rank {rank} takes GPU {rank % count} of {count}; "
        "torch.cuda.set_device() before parallelize() chooses another",
        stacklevel=frames_to_caller(),
    )
    return rank % count
