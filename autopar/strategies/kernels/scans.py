"""Cumulative sums along a dim in pieces: each rank begins with the totals of earlier pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import AllGather, CommVolume, JointKernel, KernelGroup, Steps


def cut_cumsum(
    group: KernelGroup, self: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Steps:
    """Return the local cumulative sums plus the totals of all ranks before."""
    totals = yield (yield AllGather(self.sum(dim, keepdim=True, dtype=dtype)))
    out = self.cumsum(dim, dtype=dtype)
    for total in totals[: group.index]:
        out += total
    return (out,), (), (dim, self.dtype)


def cut_cumsum_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: tuple[int, torch.dtype], grad: Tensor
) -> Steps:
    """Return the gradient: each element is in all sums from its position on."""
    dim, dtype = rest
    totals = yield (yield AllGather(grad.sum(dim, keepdim=True)))
    out = grad.flip(dim).cumsum(dim).flip(dim)
    for total in totals[group.index + 1 :]:
        out += total
    return (out.to(dtype),)


def _traffic(
    count: int, inputs: Sequence[float], outputs: Sequence[float], needs: Sequence[bool]
) -> CommVolume:
    """Return the traffic: one row of each rank."""
    once = (("all_gather", count * outputs[0]),)
    return CommVolume(once, once, (1, 1))


CUMSUM = JointKernel(cut_cumsum, cut_cumsum_backward, _traffic)
