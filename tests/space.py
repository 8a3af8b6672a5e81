"""Models whose images are cut in space: residual blocks, and a U-Net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.models import Case

ROWS = (None, None, "sp", None)


class Block(nn.Module):
    """A residual block with a stride and a dilation."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 2, dilation=2)
        self.groups = nn.GroupNorm(2, outside)
        self.beside = nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.groups(self.second(y)) + self.beside(x))


class Classifier(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, 2, 3)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(4, 4), Block(4, 8, 2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.pool(self.stem(ap.shard(x, ROWS))))
        labels = torch.arange(len(x), device=x.device) % 5
        return F.cross_entropy(self.head(y.mean((2, 3))), labels)


class UNet(nn.Module):
    """Down by half, and up again by a transposed convolution or a resizing."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = Block(3, 4), Block(4, 8), up
        self.after, self.out = Block(8, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(ap.shard(x, ROWS))
        up = self.up(self.inner(F.avg_pool2d(down, 2)))
        return F.mse_loss(self.out(self.after(torch.cat([down, up], 1))), x)


def in_space(name: str) -> Case:
    """A case by its name."""
    torch.manual_seed(0)
    if name == "classifier":
        return Case(name, Classifier().double(), (torch.randn(2, 3, 45, 33).double(),))
    up: nn.Module = nn.ConvTranspose2d(8, 4, 2, 2)
    if name != "transposed":
        up = nn.Sequential(nn.Upsample(scale_factor=2, mode=name), nn.Conv2d(8, 4, 3, padding=1))
    return Case(name, UNet(up).double(), (torch.randn(2, 3, 26, 18).double(),))
