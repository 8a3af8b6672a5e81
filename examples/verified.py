"""A model with data for `autopar verify`, which trains it plain, captured and in parallel.

    python -m autopar.cli verify examples/verified.py:model --mesh dp=2,tp=2
    python -m autopar.cli verify examples/verified.py:model --mesh pp=2,dp=2 --schedule zb-h1

The function returns (model, args, kwargs).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Residual layers and a norm before a cross-entropy."""

    def __init__(self, inputs: int, width: int, classes: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(self.norm(x)), target)


def model() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
    """A classifier and a batch of 16."""
    torch.manual_seed(0)
    return Classifier(16, 64, 10, 4), (torch.randn(16, 16), torch.randint(10, (16,))), {}
