"""Batch norm in two steps, so that synchronised statistics are an ordinary partial sum.

    sums = batch_sums(x, running_mean)                 # [2, c]: contracted over batch and space
    y = batch_normalize(x, sums, running_mean, weight, bias, count, eps)

With x cut along the batch, `sums` is a partial sum; its all-reduce, and that of its gradient, is
synchronised batch norm. The sums are taken of x - shift: with the shift near the mean,
var = E[(x - shift)^2] - E[x - shift]^2 loses no digits. Half precision is summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batch_sums(x: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return sums over all dims but 1 of x - shift and of its square, stacked to [2, c]."""
    return _BatchSums.apply(x, shift)


def batch_normalize(
    x: Tensor,
    sums: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    count: int,
    eps: float,
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, by `sums` over `count` points."""
    return _BatchNormalize.apply(x, sums, shift, weight, bias, count, eps)


def running_mean(
    old: Tensor,
    sums: Tensor,
    shift: Tensor | None,
    batches: Tensor | None,
    momentum: float | None,
    count: int,
) -> Tensor:
    """Return the new running mean; `momentum=None` averages over `batches`, this one included."""
    mean, _ = _moments(sums.detach(), shift, count)
    return _moved(old, mean, batches, momentum)


def running_var(
    old: Tensor,
    sums: Tensor,
    shift: Tensor | None,
    batches: Tensor | None,
    momentum: float | None,
    count: int,
) -> Tensor:
    """Return the new running variance, from the unbiased one, as in torch."""
    _, var = _moments(sums.detach(), shift, count)
    return _moved(old, var * (count / max(count - 1, 1)), batches, momentum)


def _moved(old: Tensor, new: Tensor, batches: Tensor | None, momentum: float | None) -> Tensor:
    if momentum is not None:
        share: Tensor | float = momentum
    elif batches is not None:
        share = 1.0 / batches.to(new.dtype)
    else:
        raise ValueError("momentum=None needs the number of batches")
    return ((1 - share) * old + share * new).to(old.dtype)


def _moments(sums: Tensor, shift: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    first, second = sums[0] / count, sums[1] / count
    mean = first if shift is None else first + shift
    return mean, (second - first * first).clamp_min(0)


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """Return a vector of channels, shaped to broadcast against x."""
    return vector.view(1, -1, *(1,) * (x.dim() - 2))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _other_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


class _BatchSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor | None) -> Tensor:
        centred = _wide(x) if shift is None else _wide(x) - _along(shift, x)
        dims = _other_dims(x)
        sums = torch.stack((centred.sum(dims), (centred * centred).sum(dims)))
        ctx.save_for_backward(x, shift, sums)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, shift, sums = ctx.saved_tensors
        slope = 2 * grad[1]
        grad_x = grad_shift = None
        if ctx.needs_input_grad[0]:
            offset = grad[0] if shift is None else grad[0] - slope * shift
            grad_x = torch.addcmul(_along(offset, x), _wide(x), _along(slope, x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            points = x.numel() // max(x.shape[1], 1)
            grad_shift = (-points * grad[0] - slope * sums[0]).to(shift.dtype)
        return grad_x, grad_shift


class _BatchNormalize(torch.autograd.Function):
    """The norm, which keeps x and vectors of channels, not the normalised x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sums: Tensor,
        shift: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        count: int,
        eps: float,
    ) -> Tensor:
        mean, var = _moments(sums, shift, count)
        invert = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, sums, mean, invert, weight, shift)
        ctx.eps = eps
        ctx.count, ctx.dtypes = count, [None if t is None else t.dtype for t in (shift, bias)]
        scale = invert if weight is None else invert * weight
        y = (_wide(x) - _along(mean, x)) * _along(scale, x)
        return (y if bias is None else y + _along(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, sums, mean, invert, weight, shift = ctx.saved_tensors
        count, (shift_dtype, bias_dtype) = ctx.count, ctx.dtypes
        if torch.is_grad_enabled():  # a gradient of the gradient sees how they depend on the sums
            mean, var = _moments(sums, shift, count)
            invert = torch.rsqrt(var + ctx.eps)
        grad, dims = _wide(grad), _other_dims(x)
        scale = invert if weight is None else invert * weight
        total = grad.sum(dims)
        slope = (grad * (_wide(x) - _along(mean, x))).sum(dims)  # of 1 / sqrt(var + eps)
        grad_x = (grad * _along(scale, x)).to(x.dtype)
        grad_mean = -scale * total
        grad_var = -0.5 * invert * invert * scale * slope
        first = (grad_mean - 2 * grad_var * sums[0] / count) / count
        return (
            grad_x,
            torch.stack((first, grad_var / count)).to(sums.dtype),
            None if shift_dtype is None else grad_mean.to(shift_dtype),
            None if weight is None else (slope * invert).to(weight.dtype),
            None if bias_dtype is None else total.to(bias_dtype),
            None,
            None,
        )
