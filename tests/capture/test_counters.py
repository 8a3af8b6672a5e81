"""Numbers that a module counts from call to call: a program cannot, and says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput


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


class ByClass(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (super().forward(x) * self.calls).sum()


def test_a_number_that_the_class_begins_with_counts_too() -> None:
    with pytest.warns(UserWarning, match=r"calls is another number"):
        capture(ByClass(4, 4))


class Keeps(nn.Linear):
    """A tensor of one call, for the next."""

    state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.state is not None:
            y = y + self.read(self.state)
        self.state = self.kept(x, y)  # the line
        return y.sum()

    def kept(self, x: Tensor, y: Tensor) -> Any:
        return y.detach()

    def read(self, state: Any) -> Tensor:
        return state


class KeepsTheFirst(Keeps):
    """As a cache of what the first batch was."""

    def kept(self, x: Tensor, y: Tensor) -> Any:
        return [x.mean()] if self.state is None else self.state

    def read(self, state: Any) -> Tensor:
        return state[0]


class KeepsWeights(Keeps):
    def kept(self, x: Tensor, y: Tensor) -> Any:
        return {"ema": 0.9 * self.weight.detach()}

    def read(self, state: Any) -> Tensor:
        return state["ema"].sum()


class KeepsNoise(Keeps):
    def kept(self, x: Tensor, y: Tensor) -> Any:
        return torch.rand(4)


@pytest.mark.parametrize("kind", [Keeps, KeepsTheFirst, KeepsWeights, KeepsNoise])
def test_a_tensor_for_the_next_call_is_refused(kind: type[Keeps]) -> None:
    model = nn.Sequential(kind(4, 4))
    with pytest.raises(InvalidInput, match="stands in a buffer") as error:
        capture(model)
    assert "0.state" in str(error.value.got)
    assert str(error.value.source).endswith("# the line")
    assert model[0].state is None


class OnlyLooksAtShapes(Keeps):
    def read(self, state: Any) -> Tensor:
        return torch.ones(state.shape[-1])


class Tabulates(nn.Linear):
    """What is made once, of no input: each call would make the same."""

    table: Any = None
    shown: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1]) / 4
        y = super().forward(x * self.table)
        self.shown = y.detach()  # which no call reads
        self.within = y.square()
        return self.within.sum()


@pytest.mark.parametrize("kind", [OnlyLooksAtShapes, Tabulates])
def test_others_are_kept_in_peace(kind: type[nn.Linear]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(kind(4, 4))


def test_what_is_looked_at_leaves_nothing_behind() -> None:
    """A table that is made once is there in the next program, too, with its values."""
    model, x = Tabulates(4, 4), torch.randn(4, 4)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    module.step(x)
    module.eval()
    torch.testing.assert_close(module(x), model(x))
