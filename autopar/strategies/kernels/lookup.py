"""Embedding with the rows of the table cut: each rank looks up the rows that it has."""

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
    """Rows `start` and on of a table looked up; ids of other ranks give zeros.

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
    found = torch.embedding(weight, local.masked_fill(outside, 0), padding)
    return found.masked_fill(outside.unsqueeze(-1), 0)
