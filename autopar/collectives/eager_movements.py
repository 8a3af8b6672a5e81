"""Movements as eager code calls them: without the dispatcher, and in place where that is safe.

A sum may be made in place when nobody else reads the tensor: the fresh output of an operator that
saves no output for backward, or a gradient that one operator has just made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import all_reduce_now, process_group, wait_for
from autopar.collectives.torch_operators import EAGER

__all__ = [
    "EAGER",
    "DeferredSum",
    "defer_sum",
    "finish_sum",
    "identity_then_sum_in_place",
    "start_sum",
    "sum_in_place",
]

StartedSum = tuple[Tensor, dist.Work]


def sum_in_place(x: Tensor, group: str, pending: bool) -> Tensor:
    """Sum a tensor that nobody else reads, as `all_reduce` does."""
    if pending or not _is_summable(x):
        return EAGER[torch.ops.autopar.all_reduce.default](x, group, pending)
    if x.requires_grad and torch.is_grad_enabled():
        return _SumInPlace.apply(x, group)
    all_reduce_now(x, group)
    return x


def identity_then_sum_in_place(x: Tensor, group: str) -> Tensor:
    """Return `x`, whose gradient nobody else reads and is summed in place."""
    if x.requires_grad and torch.is_grad_enabled():
        return _IdentityThenSumInPlace.apply(x, group)
    return x


def start_sum(x: Tensor, group: str, pending: bool) -> StartedSum:
    """Start an `all_reduce` without gradient that goes on while the program does."""
    total = x.detach().clone()
    return total, dist.all_reduce(total, group=process_group(group), async_op=True)


def finish_sum(started: StartedSum) -> Tensor:
    """Wait for the sum that `start_sum` started, and return it."""
    total, work = started
    wait_for(work)
    return total


@dataclass(frozen=True)
class DeferredSum:
    """A tensor that is still to be summed, in place, before anybody reads it."""

    tensor: Tensor
    group: str

    def start(self) -> dist.Work:
        """Start the sum, which goes on while others compute."""
        return dist.all_reduce(self.tensor, group=process_group(self.group), async_op=True)


def defer_sum(x: Tensor, group: str, late: list[DeferredSum]) -> Tensor:
    """Return a copy of `x` that the caller must sum, as `late` says, before anybody reads it."""
    return _DeferSum.apply(x, group, late)


class _DeferSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, late: list[DeferredSum]) -> Tensor:
        total = x.detach().clone()
        late.append(DeferredSum(total.detach(), group))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        all_reduce_now(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _IdentityThenSumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if grad.requires_grad or not _is_summable(grad):
            total = torch.ops.autopar.all_reduce.default(grad, ctx.group, False)
            return total, None
        all_reduce_now(grad, ctx.group)
        return grad, None


def _is_summable(x: Tensor) -> bool:
    return x.is_contiguous() and x.is_floating_point()
