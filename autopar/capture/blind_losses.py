"""Losses whose Python, or whose shapes, look at values: as functions that do not.

What is followed has no values. `gaussian_nll_loss` asks whether a variance is negative, which a
program cannot be told of; `ctc_loss` makes room for the longest target that it finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.hooks import replaced
from autopar.capture.selections import Rows
from autopar.strategies.kernels import ctc_losses


@contextmanager
def looks_at_no_values() -> Iterator[None]:
    """Within, these losses of torch.nn.functional can be followed."""
    with ExitStack() as stack:
        for function in (gaussian_nll_loss, ctc_loss):
            stack.enter_context(replaced(F, function.__name__, function))
        yield


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """log(var) + (input - target)² / var, halved. The gradient passes by the floor of `var`."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif (
            var.ndim != input.ndim or sum(b for a, b in zip(input.shape, var.shape) if a != b) != 1
        ):
            raise ValueError("var is of incorrect size")
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (var.log() + (input - target).square() / var)
    return _reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor | Rows,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Of each sample, by an operator of which each sample is a row; a mean is of means."""
    if isinstance(targets, Rows):
        assert isinstance(target_lengths, Tensor)
        targets = targets.in_front(target_lengths)
    lengths = [
        value if isinstance(value, Tensor) else torch.tensor(value, device=log_probs.device)
        for value in (input_lengths, target_lengths)
    ]
    lengths = [value.to(log_probs.device, torch.int64).reshape(-1) for value in lengths]
    is_one = log_probs.ndim == 2
    batch = log_probs.unsqueeze(1) if is_one else log_probs
    rows = targets.unsqueeze(0) if is_one and targets.ndim == 1 else targets
    losses = ctc_losses(batch, rows, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean()
    return _reduced(losses.reshape([]) if is_one else losses, reduction)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return losses if reduction == "none" else getattr(losses, reduction)()
