"""Collecting: whole tensors on all ranks, from the pieces that some of them hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.tensors import local_of
from autopar.layout import TensorType
from autopar.mesh import Mesh
from autopar.placements import from_placements
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.backends.stage_ranks import StageRanks
from autopar.runtime.module.call_outputs import join_pieces


def collect(
    values: Mapping[str, Tensor],
    ranks: StageRanks,
    line: dist.ProcessGroup | None,
    groups: Groups,
    device: torch.device,
) -> dict[str, Tensor]:
    """What the ranks of all places hold, by name; `line` joins the places."""
    mine = [(name, tuple(value.shape), value.dtype) for name, value in values.items()]
    everyones: list[Any] = [mine] * ranks.schedule.ranks
    if line is not None:
        dist.all_gather_object(everyones, mine, group=line)
    owners: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for place, listed in enumerate(everyones):
        for name, shape, dtype in listed:
            owners.setdefault(name, (place, shape, dtype))
    found = {}
    for name, (place, shape, dtype) in owners.items():
        if place == ranks.place:
            whole = _whole(values[name].detach(), ranks.inner, groups, device)
            whole = whole.clone(memory_format=torch.contiguous_format)
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if line is not None:
            dist.broadcast(whole, ranks.line[place], group=line)
        found[name] = whole
    return found


def _whole(value: Tensor, rank: int, groups: Groups, device: torch.device) -> Tensor:
    """A DTensor's data, on all ranks of its mesh."""
    local = local_of(value).to(device)
    if not isinstance(value, DTensor):
        return local
    mesh = Mesh.from_device_mesh(value.device_mesh)
    layout = from_placements(value.placements, mesh, value.ndim)
    type_ = TensorType(tuple(value.shape), value.dtype, layout)
    return join_pieces(local, type_, mesh, groups, rank)
