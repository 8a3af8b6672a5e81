"""Compute the norm of tensors that lie in pieces on many ranks, with each element counted once.

A piece that is replicated over an axis of a stage, or lies in several stages (tied parameters, both
directions of Chimera), is counted on its first rank alone. One sum over the world gives all ranks
equal bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar._torch.tensors import local_of, scale_each
from autopar.plans.runtime_program import RuntimeProgram


def norm_over_world(
    program: RuntimeProgram,
    tensors: Mapping[str, Tensor],
    norm_type: float,
    coordinate: Mapping[str, int],
    device: torch.device,
) -> Tensor:
    """Return the norm of all DTensors of which this rank holds pieces, by their parameters' names.

    `coordinate` is this rank's in the program's mesh. `tensors` has each tensor on the ranks of one
    place of a pipeline only.
    """
    axes_of = {
        name: program.kept_layout(placeholder).axes
        for placeholder, name in program.captured.parameters.items()
    }
    counted = [
        local_of(value)
        for name, value in tensors.items()
        if all(at == 0 for axis, at in coordinate.items() if axis not in axes_of.get(name, ()))
    ]
    norm = nn.utils.get_total_norm([piece for piece in counted if piece.numel()], norm_type)
    # Equal on all ranks, whatever parameters they hold; at least single precision.
    dtypes = (program.type_of(placeholder).dtype for placeholder in program.captured.parameters)
    norm = norm.to(device, reduce(torch.promote_types, dtypes, torch.float32))
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        return norm
    power = norm**norm_type
    dist.all_reduce(power)
    return power ** (1 / norm_type)


@torch.no_grad()
def limit_norm(gradients: Iterable[Tensor], max_norm: float, total: Tensor) -> Tensor:
    """Scale gradients whose norm is `total` to a norm of at most `max_norm`; return `total`.

    Local tensors are scaled together: an operation of DTensors would cost each of them Python."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in map(local_of, gradients):
        by_device[gradient.device].append(gradient)
    for device, tensors in by_device.items():
        scale_each(tensors, factor.to(device))
    return total
