"""Linear operators whose products go around an axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.models import Case

GATHERED = ap.shard(F.linear, ((None, "tp", None), ("tp", None)))  # rows of both


class Around(nn.Module):
    """Rows are cut before the first product, and columns after it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(GATHERED(x, self.up.weight)) + self.up.bias
        return F.linear(torch.tanh(y), self.down.weight, self.down.bias).pow(2).mean()


def products(hidden: int = 6, rows: int = 9) -> Case:
    """A case; rows and columns may be uneven."""
    torch.manual_seed(0)
    return Case("products", Around(hidden).double(), (torch.randn(2, rows, hidden).double(),))
