"""The norm of tensors that lie in pieces on many ranks, each element counted once.

A rank counts the pieces of which it is the first holder: a piece that is replicated over an axis
inside a stage, or lies in several stages (tied parameters, both directions of Chimera), is counted
on one rank alone. One sum over the world joins them, and gives all ranks the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.plan.runtime_program import Program


def norm_over_world(
    program: Program,
    tensors: Mapping[str, Tensor],
    norm_type: float,
    coordinate: Mapping[str, int],
    device: torch.device,
) -> Tensor:
    """The norm of DTensors by the names of their parameters, of which this rank holds pieces.

    `coordinate` is this rank's in the program's mesh. Each tensor is given on the ranks of one
    place of a pipeline only.
    """
    axes_of = {
        name: program.kept_layout(placeholder).axes
        for placeholder, name in program.captured.parameters.items()
    }
    counted = [
        value.to_local() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
        if all(at == 0 for axis, at in coordinate.items() if axis not in axes_of.get(name, ()))
    ]
    norm = nn.utils.get_total_norm([piece for piece in counted if piece.numel()], norm_type)
    # The same on all ranks, whatever parameters they hold; at least single precision.
    dtypes = (program.type_of(placeholder).dtype for placeholder in program.captured.parameters)
    norm = norm.to(device, reduce(torch.promote_types, dtypes, torch.float32))
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        return norm
    power = norm**norm_type
    dist.all_reduce(power)
    return power ** (1 / norm_type)
