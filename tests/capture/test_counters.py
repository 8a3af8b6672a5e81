"""Numbers that a module counts from call to call: a program cannot, and says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autopar as ap


class Counting(nn.Module):
    """Sets plain attributes in forward."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.counts, self.calls, self.length, self.seen = counts, 0, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.length, self.seen = x.shape[0], True
        if self.counts:
            self.calls += 1
        return (self.linear(x) * (self.length + self.calls)).sum()


def capture(model: nn.Module) -> None:
    ap.plan(model, (torch.ones(4, 4),), mesh=ap.Mesh(dp=2), mode="data")


def test_a_counter_is_told_with_its_line() -> None:
    model = nn.Sequential(Counting(counts=True))
    with pytest.warns(UserWarning, match=r"0\.calls .*self\.calls \+= 1.*a buffer") as heard:
        capture(model)
    assert len(heard) == 1
    assert heard[0].filename == __file__
    assert model[0].calls == 0


def test_numbers_that_stay_the_same_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Counting(counts=False))
