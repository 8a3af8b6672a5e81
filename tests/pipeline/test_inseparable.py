"""A batch whose samples meet in the loss goes through a pipeline in one piece."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome

MESH = ap.Mesh(pp=2)


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        return F.cross_entropy(y @ y.T, torch.arange(len(x)))


def case() -> Case:
    torch.manual_seed(0)
    return Case("contrastive", Contrastive().double(), (torch.randn(4, 4, dtype=torch.float64),))


def test_it_is_one_micro_batch_if_nobody_asks_for_more() -> None:
    first = case()
    with pytest.warns(UserWarning, match="one micro-batch, and each stage waits"):
        module = ap.parallelize(first.model, first.args, mesh=MESH, backend="virtual")
    assert (module.plan.microbatches, len(module.plan.pipelining.stages)) == (1, 2)
    assert_equal(parallel_outcome(module, first), single_outcome(case()))


def test_micro_batches_that_are_asked_for_are_refused() -> None:
    with pytest.raises(ap.InvalidInput, match="the sum of their shares"):
        ap.plan(case().model, case().args, mesh=MESH, microbatches=2)
