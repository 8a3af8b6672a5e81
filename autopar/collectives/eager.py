"""Movements as eager code calls them: without the dispatcher, and in place where that is safe.

A sum may be made in place when nobody else reads what is summed: the fresh output of an operator
that keeps no output for its backward, or a gradient that one operator has just made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import process_group
from autopar.collectives.operators import EAGER

__all__ = ["EAGER", "identity_then_sum_in_place", "sum_in_place"]


def sum_in_place(x: Tensor, group: str, pending: bool) -> Tensor:
    """`all_reduce` of a tensor that nobody else reads."""
    if pending or not _is_summable(x):
        return EAGER[torch.ops.autopar.all_reduce.default](x, group, pending)
    if x.requires_grad and torch.is_grad_enabled():
        return _SumInPlace.apply(x, group)  # type: ignore[no-any-return]
    dist.all_reduce(x, group=process_group(group))
    return x


def identity_then_sum_in_place(x: Tensor, group: str) -> Tensor:
    """`identity` of a tensor whose gradient nobody else reads."""
    if x.requires_grad and torch.is_grad_enabled():
        return _IdentityThenSumInPlace.apply(x, group)  # type: ignore[no-any-return]
    return x


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        dist.all_reduce(x, group=process_group(group))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _IdentityThenSumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if grad.requires_grad or not _is_summable(grad):
            total = torch.ops.autopar.all_reduce.default(grad, ctx.group, False)
            return total, None
        dist.all_reduce(grad, group=process_group(ctx.group))
        return grad, None


def _is_summable(x: Tensor) -> bool:
    return x.is_contiguous() and x.is_floating_point()
