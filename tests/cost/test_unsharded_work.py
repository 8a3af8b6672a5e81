"""The FLOPs of a model, counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.cost.unsharded_work import model_flops


def test_products_count_forward_and_for_each_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    rows = 16
    captured = capture(model, (torch.randn(rows, 8),), {})
    first, second = 2 * rows * 8 * 32, 2 * rows * 32 * 4
    assert model_flops(captured) == 2 * first + 3 * second  # the input wants no gradient


def test_experts_or_blocks_that_are_alike_count_each() -> None:
    blocks = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    captured = capture(blocks, (torch.randn(4, 8),), {})
    assert model_flops(captured) == (3 * 5 - 1) * 2 * 4 * 8 * 8
