"""A ViT for the benchmarks: patches by a convolution, the blocks of the GPT, the mean of places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import Block, Sizes

PATCH, CLASSES = 8, 100


class ViT(nn.Module):
    """Of square images whose patches are `sizes.sequence` many."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.hidden, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(sizes.sequence, sizes.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def images(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """The same global batch on every rank."""
    generator = torch.Generator().manual_seed(1)
    side = PATCH * round(sizes.sequence**0.5)
    given = torch.randn(sizes.batch, 3, side, side, generator=generator)
    return given, torch.randint(0, CLASSES, (sizes.batch,), generator=generator)
