"""Cross-entropy with the classes last, whole or cut.

    losses = cross_entropy(logits, target)                  # logits [..., v], target [...]
    loss = losses.sum() / count_targets(target)             # F.cross_entropy(reduction="mean")

The loss of one element is, with w the class weights, z the logits and e the label smoothing,

    (1 - e) w_t (lse - z_t) + e / v * sum_c w_c (lse - z_c)  =  W lse - Q
    W = (1 - e) w_t + e / v * sum_c w_c          Q = (1 - e) w_t z_t + e / v * sum_c w_c z_c

so three numbers of each piece of the classes are enough: the local lse, and its shares of Q and W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 3  # lse, Q, W


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of each element, 0 where the target is `ignore_index`."""
    classes = logits.shape[-1]
    losses = F.cross_entropy(
        logits.reshape(-1, classes),
        target.reshape(-1),
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(target.shape)


def count_targets(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Return the divisor of a mean loss: the number (or the weight) of targets not ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()


def count_classes(target: Tensor, classes: int, ignore_index: int = -100) -> Tensor:
    """Return how many targets are of each class, without the ignored ones."""
    counted = (target != ignore_index).reshape(-1)
    index = target.reshape(-1).masked_fill(~counted, 0)
    counts = torch.zeros(classes, dtype=torch.int64, device=target.device)
    return counts.index_add(0, index, counted.to(torch.int64))


def cross_entropy_part(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    start: int,
    classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the share of the classes from `start` on in the loss: [..., 3] of lse, Q and W."""
    return _CrossEntropyPart.apply(
        logits, target, weight, start, classes, ignore_index, label_smoothing
    )


def cross_entropy_combine(
    parts: Tensor,
    target: Tensor,
    count: int,
    ignore_index: int = -100,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the losses from the columns of all `count` pieces side by side, [..., 3 * count]."""
    lse, share, weight = parts.view(*target.shape, count, COLUMNS).unbind(-1)
    losses = weight.sum(-1) * torch.logsumexp(lse, -1) - share.sum(-1)
    losses = losses.masked_fill(target == ignore_index, 0)
    return losses if dtype is None else losses.to(dtype)


def cross_entropy_part_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], start: int, classes: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of `cross_entropy_part` from those of a localised `cross_entropy`."""
    logits, target, weight, ignore_index, smoothing = _Arguments(*args, **kwargs)
    return (logits, target, weight, start, classes, ignore_index, smoothing), {}


def cross_entropy_combine_call(
    gathered: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: int,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of `cross_entropy_combine` from those of a localised `cross_entropy`."""
    _, target, _, ignore_index, _ = _Arguments(*args, **kwargs)
    return (gathered, target, parts, ignore_index, dtype), {}


class _Arguments(NamedTuple):
    logits: Any
    target: Any
    weight: Any = None
    ignore_index: int = -100
    label_smoothing: float = 0.0


class _CrossEntropyPart(torch.autograd.Function):
    """The share of a piece of the classes; backward is one pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        start: int,
        classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        local = target - start
        is_local = (local >= 0) & (local < logits.shape[-1]) & (target != ignore_index)
        local = local.masked_fill(~is_local, 0)
        columns = wide.new_zeros(*target.shape, COLUMNS)
        if logits.shape[-1] == 0:
            columns[..., 0] = -torch.inf
        else:
            columns[..., 0] = torch.logsumexp(wide, -1)
            picked = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_local, 0)
            strength = is_local if weight is None else weight[local].masked_fill(~is_local, 0)
            columns[..., 2] = strength.to(wide.dtype) * (1 - smoothing)
            columns[..., 1] = picked * columns[..., 2]
            if smoothing:
                even = smoothing / classes
                weighted = wide.sum(-1) if weight is None else wide @ weight.to(wide.dtype)
                columns[..., 1] += even * weighted
                columns[..., 2] += even * (logits.shape[-1] if weight is None else weight.sum())
        ctx.save_for_backward(logits, local, is_local, weight, columns[..., 0])
        ctx.smoothing, ctx.classes = smoothing, classes
        return columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, is_local, weight, lse = ctx.saved_tensors
        nothing = (None,) * 6
        if torch.is_grad_enabled() and logits.shape[-1]:
            lse = torch.logsumexp(logits.to(lse.dtype), -1)  # as it depends on the logits
        if logits.shape[-1] == 0:
            return torch.zeros_like(logits), *nothing
        smoothing, slope = ctx.smoothing, grad[..., 1]
        # A row of -inf has lse -inf; its classes have probability 0.
        floor = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
        out = (logits.to(lse.dtype) - floor).exp_()
        # A gradient that has gradients of its own needs the probabilities as they are.
        out = out * grad[..., :1] if torch.is_grad_enabled() else out.mul_(grad[..., :1])
        if smoothing:
            even = slope.unsqueeze(-1) * (smoothing / ctx.classes)
            out += even if weight is None else even * weight
        strength = is_local.to(out.dtype) if weight is None else weight[local] * is_local
        picked = (slope * strength * (1 - smoothing)).to(out.dtype)
        out.scatter_add_(-1, local.unsqueeze(-1), picked.unsqueeze(-1))
        return out.to(logits.dtype), *nothing
