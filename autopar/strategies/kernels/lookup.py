"""Embedding with the rows of the table cut: each rank looks up the rows it has. Also bags."""

from __future__ import annotations

import torch
from torch import Tensor


def cut_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    start: int,
) -> Tensor:
    """Return rows of the piece of a table from `start` on; ids of other ranks give zeros.

    The sum over ranks is the embedding. The row `padding_idx` of the whole table gets no gradient.
    """
    if scale_grad_by_freq:
        raise ValueError("a cut table has no gradients by frequency")
    rows = weight.shape[0]
    if rows == 0:
        return weight.new_zeros(*indices.shape, weight.shape[1]) + weight.sum()
    local = indices - start
    outside = (local < 0) | (local >= rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else -1
    picked = torch.embedding(weight, local.masked_fill(outside, 0), padding)
    return picked.masked_fill(outside.unsqueeze(-1), 0)


def bags_of_rows(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the first result of `embedding_bag`: a sum, mean or maximum of rows a bag."""
    return torch.ops.aten.embedding_bag.padding_idx(
        weight,
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )[0]
