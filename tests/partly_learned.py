"""A model that reads many of its parameters without giving them a gradient.

>>> case = partly_learned(layers=4)
>>> without_gradient(case)      # {"unused.weight", "blocks.0.gate.weight", ...}
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Case


class Block(nn.Module):
    """One layer that learns; its other parameters are compared, counted, detached or half read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.average = nn.Parameter(torch.randn(width, width))
        self.bound, self.kind = (nn.Parameter(torch.randn(width)) for _ in range(2))
        self.halves = nn.Parameter(torch.randn(2 * width))  # one is read: the other's are zeros

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            average = F.linear(x, self.average)
        gate = self.gate(x)
        y = torch.where(gate > self.bound, torch.tanh(self.layer(x)), x)
        y = y + average + 0.1 * self.average.argmax() + self.halves.chunk(2)[0]
        return y + x.type_as(self.kind) + 0.1 * gate.argmax(-1, keepdim=True)


class PartlyLearned(nn.Module):
    """Its loss reads `side` from the first layer on, but only to compare."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.side, self.last, self.second, self.frozen, self.unused = (
            nn.Linear(width, width) for _ in range(6)
        )
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.frozen.requires_grad_(False)
        self.constant, self.zero = (nn.Parameter(torch.randn(width)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = torch.relu(self.side(x))
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        h = self.frozen(h)
        target = self.last(side).argmax(-1)  # `last` learns by the loss alone
        losses = F.cross_entropy(self.last(h) * (side > 0), target, reduction="none")
        terms = (0 * self.zero).sum() + self.constant.detach().square().sum()
        return losses.sum() / x.shape[0] + terms, self.second(h)


def partly_learned(layers: int = 2, width: int = 4, batch: int = 8) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = PartlyLearned(width, layers).double(), torch.randn(batch, width).double()
    return Case("partly learned", model, (x,))


def without_gradient(case: Case, output: int = 0) -> set[str]:
    """The parameters that the single model gives none when one of its outputs is differentiated."""
    one = case.fresh()
    one.run()[output].sum().backward()
    return {name for name, parameter in one.model.named_parameters() if parameter.grad is None}
