"""What forward writes to its arguments is written to the caller's tensors, and trained with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput

X = torch.ones(4, 4)


class Writes(nn.Module):
    """To both arguments, in whole and in part, before and after they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        ignored = labels < 0
        labels.masked_fill_(labels == -100, 0)
        before = x.sum(1, keepdim=True)
        shift = torch.zeros(4, dtype=x.dtype).float().to(x.dtype)
        shift.to(x.dtype).fill_(0.25).type_as(x)[0] = 0.5
        x[:, 1:].mul_(0.5)
        x.clamp_(max=1.0)
        hidden = torch.tanh(before + self.first(x + shift))
        losses = F.cross_entropy(self.second(hidden), labels, reduction="none")
        return losses.masked_fill(ignored, 0.0).sum()


def example() -> tuple[Writes, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.tensor([1, -100, 0, 4, -100, 2, 3, 3])
    return Writes().double(), 2 * torch.randn(8, 4, dtype=torch.float64), labels


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=2, tp=2)},
        {"mesh": ap.Mesh(pp=2), "microbatches": 2, "schedule": "gpipe"},
    ],
)
def test_they_are_those_of_the_model(options: dict[str, Any]) -> None:
    model, x, labels = example()
    plain, own = copy.deepcopy(model), [x.clone(), labels.clone()]
    module = ap.parallelize(model, (x, labels), backend="virtual", **options)
    assert torch.equal(x, own[0])  # a plan writes to nothing
    ours = torch.optim.SGD(module.parameters(), lr=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(3):
        loss, expected = module.step(x, labels), plain(*own)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(x, own[0])
        assert torch.equal(labels, own[1])
    assert not torch.equal(own[0], example()[1])
    module.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x, labels), plain(*own))
    assert torch.equal(x, own[0])


def test_verify_gives_each_its_own() -> None:
    model, x, labels = example()
    before = x.clone()
    assert ap.verify(model, (x, labels), mesh=ap.Mesh(dp=2)).ok
    assert torch.equal(x, before)


def test_an_argument_that_shares_memory_is_refused() -> None:
    class Same(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.clamp_(0.0)
            return super().forward(x + y).sum()

    x = torch.randn(4, 4)
    with pytest.raises(InvalidInput, match="shares no memory") as error:
        capture(Same(4, 4), (x, x[:]))
    assert "x.clamp_(0.0)" in str(error.value.source)
    module = ap.parallelize(Same(4, 4), (x, x.clone()), mesh=ap.Mesh(dp=2), backend="virtual")
    with pytest.raises(InvalidInput, match="shares no memory"):
        module.step(x, x)


def _by_parameter(self: Any, x: Tensor) -> Tensor:
    x.add_(self.weight)
    return self.plain(x).sum()


def _by_chance(self: Any, x: Tensor) -> Tensor:
    x.add_(torch.rand_like(x))
    return self.plain(x).sum()


@pytest.mark.parametrize("forward", [_by_parameter, _by_chance])
def test_what_more_than_inputs_says_is_refused(forward: Any) -> None:
    kind = type("Model", (nn.Linear,), {"forward": forward, "plain": nn.Linear.forward})
    with torch.no_grad(), pytest.raises(InvalidInput, match="changes only") as error:
        capture(kind(4, 4), (torch.randn(4, 4),))
    assert "x.add_" in str(error.value.source)


def test_one_that_nothing_reads_is_told_by_the_mode() -> None:
    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sum()
            if self.training:
                x.clamp_(0.0)
            return y

    torch.manual_seed(0)
    model, x = Last(4, 4), torch.randn(4, 4)
    module, own = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual"), x.clone()
    module.eval()
    module(x)
    assert torch.equal(x, own)
    module.train()
    module.step(x)
    assert torch.equal(x, own.clamp(0.0))


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x).sum()


def test_one_that_takes_a_gradient_is_refused() -> None:
    module = ap.parallelize(Doubles(4, 4), (X,), mesh=ap.Mesh(dp=2), backend="virtual")
    learned = torch.randn(4, 4, requires_grad=True)
    for given in (learned, learned * 2):
        with pytest.raises(InvalidInput, match="changes in place takes no gradient") as error:
            module(given)
        assert "x.mul_(2)" in str(error.value.source)


class DoublesWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(2)
        return super().forward(x).sum()


def test_a_parameter_that_the_model_itself_cannot_change() -> None:
    with pytest.raises(InvalidInput, match="the model runs on the example inputs"):
        capture(DoublesWeight(4, 4), (X.clone().requires_grad_(),))
