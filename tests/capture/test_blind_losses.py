"""Losses that look at values are followed without: what they give is theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.capture.support import Function, program, random, targets

REDUCTIONS = ["mean", "sum", "none"]
LENGTHS = torch.tensor([6, 5, 6]), torch.tensor([3, 0, 2])
ROWS = torch.tensor([[1, 2, 3], [0, 0, 0], [2, 2, 0]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (3,)], ids=str)
def test_variances(reduction: str, shape: tuple[int, ...]) -> None:
    """Some are below their floor, which gradients pass by."""

    def forward(self: Function, x: Tensor, given: Tensor) -> Tensor:
        return F.gaussian_nll_loss(self.linear(x), x, given * 1.0, reduction=reduction)

    program(forward, random(3, 4), random(*shape).relu().requires_grad_())


def test_a_variance_may_be_a_number() -> None:
    program(lambda self, x: F.gaussian_nll_loss(self.linear(x), x, 0.5, full=True), random(3, 4))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_alignments(reduction: str) -> None:
    def forward(self: Function, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.linear(x).log_softmax(-1)
        impossible = torch.tensor([1, 1, 1])
        numbers = (6, 6, 5), (3, 1, 2)
        return (
            F.ctc_loss(scores, ROWS, *LENGTHS, reduction=reduction),
            F.ctc_loss(scores, ROWS, impossible, LENGTHS[1], 0, reduction, True),
            F.ctc_loss(scores, ROWS, *numbers, 3, reduction),
            F.ctc_loss(scores, ROWS.flatten()[:5], *LENGTHS, reduction=reduction),
            F.ctc_loss(scores[:, 0], ROWS[0], LENGTHS[0][0], LENGTHS[1][0], reduction=reduction),
        )

    captured = program(forward, random(6, 3, 4))
    assert targets(captured).count("autopar.ctc_losses") == 5


def test_what_they_refuse_is_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gaussian_nll_loss(x, x, x[:2])

    with pytest.raises(ap.AutoparError, match="var is of incorrect size"):
        ap.plan(Wrong(), (random(3, 4),), mesh=ap.Mesh(x=2), progress=False)
