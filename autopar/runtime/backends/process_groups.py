"""Make a process group for each set of axes that a program uses, and choose each rank's GPU."""

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
    """The process groups of this rank by the axes that they span; members make one together."""

    def __init__(
        self,
        mesh: Mesh,
        wanted: Iterable[Axes],
        copies: Sequence[Sequence[int]],
        purpose: str = "",
    ) -> None:
        """`copies`: the global ranks of each mesh like this one, of which stages have one each.

        torch names a group after the number of groups before it. So if the copies hold all ranks
        of the world, these make all groups together; else only members make theirs, after
        `equalize_group_counts`.
        """
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        joined = world()
        by_all = sum(map(len, copies)) == joined.size
        for axes in sorted(set(wanted)):
            for ranks, places in itertools.product(copies, mesh.groups(axes)):
                members = [ranks[place] for place in places]
                if by_all or joined.rank in members:
                    group = joined.group_of(members, by_all=by_all, purpose=purpose)
                    if group is not None:
                        self._groups[axes] = group

    def name(self, axes: Axes) -> str:
        """Return the name of the group over `axes` in torch's registry."""
        return self._groups[axes].group_name

    def __getitem__(self, axes: Axes) -> dist.ProcessGroup:
        return self._groups[axes]


def equalize_group_counts(device_mesh: DeviceMesh) -> None:
    """Make groups until all ranks of a mesh have seen equally many: torch counts for names."""
    most = torch.tensor(named_group_count(), device=device_mesh.device_type)
    for group in device_mesh.get_all_groups():
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    for _ in range(int(most) - named_group_count()):
        new_group([dist.get_rank()], use_local_synchronization=True)


def enter_world(model_device: torch.device) -> torch.device:
    """Join the world of ranks if this process has not yet; return its device."""
    require_living()
    if not dist.is_available() or not (dist.is_initialized() or dist.is_torchelastic_launched()):
        raise InvalidInput(
            'backend="torch" runs under torch.distributed',
            got="a single process without a process group",
            remedy='start it with torchrun, or use backend="virtual"',
        )
    device = _own_device(model_device)
    if not dist.is_initialized():
        # States on the host of a GPU move over gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    joined = world()
    report_uncaught_errors()
    with stop_all_on_failure(agreed=True):
        joined.meet()
    return device


def require_host_moves(group: Any) -> None:
    """Refuse a group that cannot move tensors of the host."""
    if not moves_host_tensors(group):
        raise InvalidInput(
            "ranks that keep states on the host belong to a world that moves tensors there too",
            got="a world that was joined for GPUs alone",
            remedy='init_process_group("cpu:gloo,cuda:nccl"), or none before parallelize()',
        )


def require_world_of(mesh: Mesh) -> None:
    """Refuse a mesh that has more or fewer ranks than the world."""
    if dist.get_world_size() != mesh.size:
        raise InvalidInput(
            "a mesh has as many ranks as the world",
            got=f"{mesh} with {counted(mesh.size, 'rank')} in a world of {dist.get_world_size()}",
            remedy=f"torchrun --nproc-per-node {mesh.size} on one machine, or another mesh",
        )


def _own_device(model_device: torch.device) -> torch.device:
    """Return this rank's GPU, or the CPU.

    A GPU that `torch.cuda.set_device` chose stays. In a world over gloo a rank computes where its
    model is, so that several ranks may share a GPU.
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
    """Return the index of a GPU for this rank on its machine, if the user has chosen none."""
    local, ranks_here = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if count == 1:  # or the only one visible to this rank
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
