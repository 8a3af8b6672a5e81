"""Fused attention on meta tensors: one kernel there too, where torch would take it apart.

On a device attention with four dims keeps no scores, and makes none in memory; on meta tensors
torch writes them all, which nothing that runs ever holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_ATTENTION = F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default


class FusedAttention(TorchFunctionMode):
    """Run attention inside as the fused kernel of a device, if there is one."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _ATTENTION:
            result = _fused(*args, **(kwargs or {}))
            if result is not None:
                return result
        return function(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the kernel's result for any shape; `strategies/rules/attention.py` says
    which values it keeps for backward."""
    heads = -3 if enable_gqa else -2
    alike = query.shape[:heads] == key.shape[:heads] == value.shape[:heads]
    learns = attn_mask is not None and attn_mask.requires_grad
    if query.ndim != 4 or query.shape[-1] != value.shape[-1] or dropout_p or learns or not alike:
        return None
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
