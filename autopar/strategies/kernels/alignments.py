"""Losses of sequences over all their alignments with a target, a row for each sample.

torch's operator allocates by the longest target, which only values tell. This one keeps its inputs,
and goes over the alignments again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the loss of each sample."""
    losses, _ = aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return losses.masked_fill(losses == torch.inf, 0) if zero_infinity else losses


@torch.library.custom_op("autopar::ctc_slopes", mutates_args=())
def ctc_slopes(
    slope: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the gradient of `log_probs`, from the gradient `slope` of the losses."""
    sequences = [log_probs, targets, input_lengths, target_lengths]
    losses, alpha = aten._ctc_loss.Tensor(*sequences, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(slope, *sequences, losses, alpha, blank, zero_infinity)


@ctc_losses.register_fake
def _(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_slopes.register_fake
def _(slope: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    of_log_probs = ctc_slopes(slope, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return of_log_probs, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_remember)
