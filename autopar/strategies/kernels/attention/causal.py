"""Causal attention with the queries cut: each rank has queries from `start` on, and all keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cut_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    start: int,
    **options: Any,
) -> Tensor:
    """Return attention whose query row i sees keys up to start + i; no later keys are read.

    `options`: scale and enable_gqa.
    """
    if attn_mask is not None or not is_causal:
        raise ValueError("a mask takes the place of is_causal")
    rows = query.shape[-2]
    seen = min(start + rows, key.shape[-2])
    if rows == 0:
        seen = min(1, key.shape[-2])
    positions = torch.arange(start, start + rows, device=query.device)
    mask = torch.arange(seen, device=query.device) <= positions.unsqueeze(-1)
    return F.scaled_dot_product_attention(
        query,
        key[..., :seen, :],
        value[..., :seen, :],
        attn_mask=mask,
        dropout_p=dropout_p,
        **options,
    )
