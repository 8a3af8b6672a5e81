"""Group norm with a dim of its space cut: means and deviations are those of all pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import AllReduce, CommVolume, JointKernel, KernelGroup, Steps


def cut_group_norm(
    group: KernelGroup,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    **_: object,
) -> Steps:
    """Return the norm: first sum for the mean, then for the deviations, which loses no digits."""
    x, count = _grouped(input, num_groups), _points(group, input, num_groups)
    (mean,) = yield (yield AllReduce(x.sum(-1) / count))
    (variance,) = yield (yield AllReduce((x - mean.unsqueeze(-1)).square().sum(-1) / count))
    inverse = torch.rsqrt(variance + eps)
    y = _normal(input, num_groups, mean, inverse)
    if weight is not None:
        y = y * _along(weight, y)
    if bias is not None:
        y = y + _along(bias, y)
    parameters = tuple(p for p in (weight,) if p is not None)
    return (y.to(input.dtype),), (input, *parameters, mean, inverse), (num_groups, bias is not None)


def cut_group_norm_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: tuple[int, bool], grad: Tensor
) -> Steps:
    """Return the gradients; the points of a group share two sums."""
    input, *parameters, mean, inverse = saved
    num_groups, has_bias = rest
    count, wide = _points(group, input, num_groups), grad.to(mean.dtype)
    normal = _normal(input, num_groups, mean, inverse)
    slope = wide * _along(parameters[0], wide) if parameters else wide
    grouped, around = _grouped(slope, num_groups), _grouped(normal, num_groups)
    terms = torch.stack((grouped.sum(-1), (grouped * around).sum(-1))) / count
    ((common, along),) = yield (yield AllReduce(terms))
    of_x = grouped - common.unsqueeze(-1) - around * along.unsqueeze(-1)
    of_input = (of_x * inverse.unsqueeze(-1)).view(input.shape).to(input.dtype)
    dims = [dim for dim in range(grad.ndim) if dim != 1]
    gradients: list[Tensor] = [of_input]
    if parameters:
        gradients.append((wide * normal).sum(dims).to(parameters[0].dtype))
    if has_bias:
        gradients.append(wide.sum(dims).to(grad.dtype))
    return tuple(gradients)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return the points of each group of each sample, in a dtype for sums."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups).to(wide)


def _normal(x: Tensor, groups: int, mean: Tensor, inverse: Tensor) -> Tensor:
    y = (_grouped(x, groups) - mean.unsqueeze(-1)) * inverse.unsqueeze(-1)
    return y.view(x.shape)


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """Return a vector of channels, shaped to broadcast against x."""
    return vector.view(-1, *(1,) * (x.ndim - 2))


def _points(group: KernelGroup, x: Tensor, groups: int) -> int:
    """Return the number of points of a group of one sample, of all pieces."""
    cut = group.input(0)
    uncut = math.prod(size for dim, size in enumerate(x.shape) if dim not in (0, 1, cut.dim))
    return x.shape[1] // groups * uncut * cut.size


def _traffic(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
    n: int,
    g: int,
) -> CommVolume:
    sums = 8.0 * n * g
    once = ("all_reduce", sums)
    return CommVolume((once, once), (("all_reduce", 2 * sums),), (2, 2))


GROUP_NORM = JointKernel(cut_group_norm, cut_group_norm_backward, _traffic, told=("n", "g"))
