"""Nets of our own for `benchmarks/models.py`: vision and diffusion, as they are written today.

Each gives its loss, in training mode, from the tensors that its builder gives beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models

Model = tuple[nn.Module, dict[str, Any]]


class DropPath(nn.Module):
    """Leaves out the residual of whole samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = 1 - self.rate
        mask = torch.empty((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype).bernoulli_(keep)
        return x * mask / keep


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, and a perceptron over channels with a scale for each."""

    def __init__(self, channels: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))
        self.drop = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + self.drop(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        stages: list[nn.Module] = []
        for index in range(2):
            channels = width * 2**index
            stages += [ConvNeXtBlock(channels, 0.1) for _ in range(2)]
            stages += [nn.Conv2d(channels, 2 * channels, 2, 2)] if index == 0 else []
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.stages(self.stem(images))
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), target, label_smoothing=0.1)


class ExciteBlock(nn.Module):
    """Squeeze and excitation after an inverted bottleneck."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
        )
        self.squeeze, self.excite = nn.Conv2d(wide, channels, 1), nn.Conv2d(channels, wide, 1)
        self.project = nn.Sequential(
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )
        self.drop = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        weights = F.adaptive_avg_pool2d(y, 1)
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(weights))))
        return x + self.drop(self.project(y))


class EfficientNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU()
        )
        self.blocks = nn.Sequential(*(ExciteBlock(width) for _ in range(2)))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, classes))

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), target)


def times(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of steps of diffusion."""
    order = torch.arange(width // 2, dtype=steps.dtype, device=steps.device)
    rates = torch.exp(-math.log(10000.0) * order / (width // 2))
    angles = steps[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimedBlock(nn.Module):
    """A residual block that is told the step of diffusion."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(width, outputs)
        self.dropout = nn.Dropout(0.1)
        same = inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.second(self.dropout(F.silu(self.norm2(y))))


class SpatialAttention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, channels // self.heads, -1)
        query, key, value = qkv.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(y.transpose(-1, -2).reshape(batch, channels, height, width))


class UNet(nn.Module):
    """Tells the noise of an image at a step of diffusion; attention where it is smallest."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width, inner = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, inner))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            [TimedBlock(width, width, inner), TimedBlock(width, 2 * width, inner)]
        )
        self.smaller = nn.ModuleList(
            [nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)]
        )
        self.middle = nn.ModuleList([TimedBlock(2 * width, 2 * width, inner) for _ in range(2)])
        self.attention = SpatialAttention(2 * width, 4)
        self.up = nn.ModuleList(
            [TimedBlock(4 * width, width, inner), TimedBlock(2 * width, width, inner)]
        )
        self.norm, self.head = nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        signal = torch.cos(steps / 1000.0 * math.pi / 2)[:, None, None, None]
        x = self.stem(signal * images + (1 - signal**2).sqrt() * noise)
        time = self.time(times(steps, self.width))
        kept = []
        for block, smaller in zip(self.down, self.smaller):
            x = block(x, time)
            kept.append(x)
            x = smaller(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block, skip in zip(self.up, reversed(kept)):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skip], dim=1), time)
        return F.mse_loss(self.head(F.silu(self.norm(x))), noise)


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: norms whose shift, scale and gate the step tells."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(hidden, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU("tanh"))
        self.down = nn.Linear(4 * hidden, hidden)
        self.told = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.told(time)[:, None].chunk(6, dim=-1)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.down(self.mlp(self.norm2(x) * (1 + scale2) + shift2))


class DiT(nn.Module):
    def __init__(self, hidden: int = 32, heads: int = 4, size: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.hidden = hidden
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, hidden))
        self.time, self.labels = nn.Linear(hidden, hidden), nn.Embedding(10, hidden)
        self.blocks = nn.ModuleList(DiffusionBlock(hidden, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * patch * patch)
        self.shuffle = nn.PixelShuffle(patch)

    def forward(self, images: Tensor, noise: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images + noise).flatten(2).transpose(1, 2) + self.places
        told = self.time(times(steps, self.hidden)) + self.labels(labels)
        for block in self.blocks:
            x = block(x, told)
        side = math.isqrt(x.shape[1])
        x = self.head(self.norm(x)).transpose(1, 2).unflatten(2, (side, side))
        return F.mse_loss(self.shuffle(x), noise)


def _built(make: Callable[[], nn.Module], **shapes: Any) -> Model:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return make().train(), {name: value() for name, value in shapes.items()}


def _images(size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(8, 3, size, size)


def _classes() -> Tensor:
    return torch.randint(0, 10, (8,))


def _steps() -> Tensor:
    return torch.randint(0, 1000, (8,)).double()


def _resnet() -> Model:
    case = models.resnet(bottleneck=True, width=16, blocks=2)
    return case.model, dict(zip(("images", "target"), case.args))


NETS: dict[str, Callable[[], Model]] = {
    "net-resnet": _resnet,
    "net-convnext": lambda: _built(ConvNeXt, images=_images(32), target=_classes),
    "net-efficientnet": lambda: _built(EfficientNet, images=_images(16), target=_classes),
    "net-unet": lambda: _built(UNet, images=_images(16), noise=_images(16), steps=_steps),
    "net-dit": lambda: _built(
        DiT, images=_images(16), noise=_images(16), steps=_steps, labels=_classes
    ),
}
