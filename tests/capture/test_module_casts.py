"""What forward casts of its own modules is what it is already, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput


class Routed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(self.dtype)
        return self.router(x.to(self.dtype)).square().sum()


def test_a_cast_to_what_it_is_is_none() -> None:
    model, x = Routed(torch.float64).double(), torch.randn(8, 4, dtype=torch.float64)
    assert ap.verify(model, (x,), mesh=ap.Mesh(dp=2)).ok


def test_another_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match="leaves the dtypes") as error:
        capture(Routed(torch.float64), (torch.randn(8, 4),))
    assert "weight of a Linear, from torch.float32" in str(error.value.got)
    assert "self.router.to(self.dtype)" in str(error.value.source)
