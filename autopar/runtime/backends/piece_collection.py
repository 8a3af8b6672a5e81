"""Collect full tensors on all ranks from the pieces that some ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.tensors import local_of
from autopar.mesh import Mesh
from autopar.placements import from_placements
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.backends.stage_ranks import StageRanks
from autopar.runtime.module.call_outputs import join_pieces
from autopar.tensor_type import TensorType


def collect(
    values: Mapping[str, Tensor],
    ranks: StageRanks,
    line: dist.ProcessGroup | None,
    groups: Groups,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the full tensors that the ranks of all pipeline places hold, by name; `line` joins
    the places. The first place that holds a tensor sends it."""
    local = [(name, tuple(value.shape), value.dtype) for name, value in values.items()]
    listings: list[Any] = [local] * ranks.schedule.ranks
    if line is not None:
        dist.all_gather_object(listings, local, group=line)
    owners: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for place, listing in enumerate(listings):
        for name, shape, dtype in listing:
            owners.setdefault(name, (place, shape, dtype))
    collected = {}
    for name, (place, shape, dtype) in owners.items():
        if place == ranks.place:
            whole = _full_tensor(values[name].detach(), ranks.rank_in_stage, groups, device)
            whole = whole.clone(memory_format=torch.contiguous_format)
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if line is not None:
            dist.broadcast(whole, ranks.line[place], group=line)
        collected[name] = whole
    return collected


def _full_tensor(value: Tensor, rank: int, groups: Groups, device: torch.device) -> Tensor:
    """Return a DTensor's full data, on all ranks of its mesh."""
    local = local_of(value).to(device)
    if not isinstance(value, DTensor):
        return local
    mesh = Mesh.from_device_mesh(value.device_mesh)
    layout = from_placements(value.placements, mesh, value.ndim)
    type_ = TensorType(tuple(value.shape), value.dtype, layout)
    return join_pieces(local, type_, mesh, groups, rank)
