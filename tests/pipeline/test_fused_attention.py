"""What attention takes while it runs: as the kernel that a device has for it, without scores."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.pipeline.memory.call_memory import _observe

HEADS, LENGTH, WIDTH = 4, 512, 16
SCORES = HEADS * LENGTH * LENGTH * 4


def heads(count: int) -> Tensor:
    return torch.empty(1, count, LENGTH, WIDTH, device="meta", requires_grad=True)


def seen(groups: int = HEADS, **options: Any) -> tuple[int, int, tuple[int | None, ...]]:
    leaves = [heads(HEADS), heads(groups), heads(groups)]
    return _observe(partial(F.scaled_dot_product_attention, *leaves, **options), leaves, None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.5},
        {"attn_mask": torch.empty(LENGTH, LENGTH, device="meta")},
        {"groups": 2, "enable_gqa": True, "is_causal": True},
    ],
    ids=["plain", "causal", "scaled", "masked", "grouped"],
)
def test_no_scores_are_made(options: dict[str, Any]) -> None:
    forward, backward, gradients = seen(**options)
    assert forward < SCORES / 8
    assert backward < SCORES / 8
    few = options.get("groups", HEADS)
    assert gradients == tuple(count * LENGTH * WIDTH * 4 for count in (HEADS, few, few))


def test_what_has_no_such_kernel_makes_them() -> None:
    mask = torch.empty(LENGTH, LENGTH, device="meta", requires_grad=True)
    assert seen(attn_mask=mask)[0] > SCORES / 2
