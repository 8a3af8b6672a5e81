"""RMS norm that keeps its input, its weight and a number for each row, on every device.

torch has a fused kernel for GPUs. On a CPU it composes operators, which keep the normalised input,
too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dims, as `F.rms_norm`."""
    if x.device.type == "cpu":
        return _RmsNorm.apply(x, len(normalized_shape), weight, eps)
    return F.rms_norm(x, normalized_shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """RMS norm by torch's operators, in their order and precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, count: int, weight: Tensor | None, eps: float | None
    ) -> Tensor:
        dims = list(range(x.dim() - count, x.dim()))
        invert = _inverted(x, dims, eps)
        ctx.save_for_backward(x, invert, weight)
        ctx.dims, ctx.eps = dims, eps
        y = _wide(x) * invert
        return (y if weight is None else y * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, invert, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient sees how it depends on x
            invert = _inverted(x, ctx.dims, ctx.eps)
        y, grad = _wide(x) * invert, _wide(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            slope = grad if weight is None else grad * weight
            shared = (slope * y).mean(ctx.dims, keepdim=True)
            grad_x = (invert * (slope - y * shared)).to(x.dtype)
        if ctx.needs_input_grad[2]:
            rows = list(range(x.dim() - weight.dim()))
            product = grad * y
            grad_weight = (product.sum(rows) if rows else product).to(weight.dtype)
        return grad_x, None, grad_weight, None


def _inverted(x: Tensor, dims: list[int], eps: float | None) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) of each row."""
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
