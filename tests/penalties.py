"""Weight penalties: parameters whose gradient comes in part from the batch, in part whole."""

from __future__ import annotations

from functools import cache

import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.models import Case


class Penalised(nn.Module):
    """A model whose loss has a penalty on all of its parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.inner(x, target) + 0.01 * penalty + 0.1 * F.relu(self.inner.head.weight).mean()


@cache
def penalised() -> Case:
    """One case that all who ask read, and none changes."""
    case = models.mlp(inputs=8, hidden=12, outputs=8, layers=2)
    return Case("penalised", Penalised(case.model), case.args)
