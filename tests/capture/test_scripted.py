"""Functions of TorchScript are captured as they are written, however often they have run."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import autopar as ap
from tests.models import Case
from tests.parity import assert_parity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated, and used

    @torch.jit.script
    def gated(x: Tensor, gate: Tensor) -> Tensor:
        return x * gate + x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.layer(x), x.cos()).square().mean()


def test_a_function_that_is_compiled_keeps_its_gradients() -> None:
    x, model = torch.randn(4, 4, dtype=torch.float64), Gated().double()
    for _ in range(3):  # after two calls TorchScript differentiates it by itself
        model(x).backward()
    model.zero_grad()
    assert_parity(Case("gated", model, (x,)), ap.Mesh(dp=2))
    assert model(x).requires_grad
