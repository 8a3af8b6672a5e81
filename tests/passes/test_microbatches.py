"""Micro-batches: shares of the loss add up exactly, or the model is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar as ap
from autopar.capture import capture
from autopar.passes.microbatches import cut_batch
from tests.models import Case, bert, gpt, llama, mlp, vit
from tests.parity import assert_equal, parallel_outcome, single_outcome


@pytest.mark.parametrize("make", [mlp, gpt, llama, bert, vit])
def test_a_step_is_that_of_the_whole_batch(make):
    case = make(**({} if make is mlp else {"layers": 1}))
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(dp=2),
        backend="virtual",
        check=True,
        microbatches=4,
    )
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


class Head(nn.Module):
    """A linear layer and any loss of its output."""

    def __init__(self, loss):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x):
        return self.loss(self.layer(x), x, self.layer.weight)


def masked(y, x, w):
    mask = (x > 0).sum(1)
    return (y.sum(1) * mask).sum() / mask.sum().clamp(min=1)


def in_fresh_memory(y, x, w):
    z = y.new_empty(y.shape)
    z[:, :2], z[:, 2:] = y[:, 2:], x[:, :2]
    return (z + torch.empty_like(y).fill_(0.5)).square().mean()


LOSSES = {
    "sum": lambda y, x, w: y.sum(),
    "half a mean": lambda y, x, w: 0.5 * F.mse_loss(y, x),
    "two terms": lambda y, x, w: y.square().mean() + 0.1 * (y - x).abs().sum() / 7,
    "divided by the batch": lambda y, x, w: y.square().sum() / x.shape[0],
    "with a regulariser": lambda y, x, w: y.square().mean() + 0.01 * w.square().sum(),
    "minus a regulariser": lambda y, x, w: 0.01 * w.square().sum() - y.square().mean(),
    "masked": masked,
    "of an element of each sample": lambda y, x, w: y[torch.arange(6), x.argmax(1)].square().mean(),
    "with copies for each sample": lambda y, x, w: (
        (y.view(12, 2) * w[:2, :2].repeat(6, 1)).square().mean()
    ),
    "in fresh memory": in_fresh_memory,
    "of each element": lambda y, x, w: (y / x.shape[0]).square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("count", [2, 6])
def test_losses_that_add_up(loss, count):
    torch.manual_seed(0)
    model = Head(loss).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    module = ap.parallelize(
        model, (x,), mode="propagate", mesh=ap.Mesh(dp=1), backend="virtual", microbatches=count
    )
    expected = model(x)
    expected.backward()
    assert torch.allclose(module.step(x), expected.detach(), rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(module.full_grads()[name], parameter.grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, x, w: y.sum().square(), "takes a gradient is not the loss yet"),
        (lambda y, x, w: (y - y.mean(0)).square().sum(), "takes a gradient"),
        (lambda y, x, w: y.max(), "samples"),
        (lambda y, x, w: (y @ y.t()).sum(), "micro-batches|whole batch|samples"),
        (lambda y, x, w: w.square().sum(), "not a sum over the samples"),
        (lambda y, x, w: y, "returns its loss"),
    ],
)
def test_losses_that_do_not(loss, message):
    captured = capture(Head(loss).double(), (torch.randn(6, 4, dtype=torch.float64),))
    with pytest.raises(ap.InvalidInput, match=message):
        cut_batch(captured, 2)


@pytest.mark.parametrize("count", [0, -1, 4, 1.5, True])
def test_numbers_of_micro_batches(count):
    captured = capture(Head(LOSSES["sum"]).double(), (torch.randn(6, 4, dtype=torch.float64),))
    with pytest.raises(ap.InvalidInput, match="micro-batches"):
        cut_batch(captured, count)


class Counting(nn.Module):
    """A loss scaled by the number of the step; `scaled=False`: nothing reads the number."""

    def __init__(self, scaled):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.scaled = scaled

    def forward(self, x):
        self.steps += 1
        y = self.second(torch.relu(self.first(x))).square().mean()
        return y / self.steps if self.scaled else y


@pytest.mark.parametrize(
    ("scaled", "options"),
    [
        (True, {"mesh": ap.Mesh(dp=2), "microbatches": 4}),
        (False, {"mesh": ap.Mesh(pp=2), "microbatches": 2, "schedule": "1f1b"}),
    ],
)
def test_a_counter_of_steps_counts_steps(scaled, options):
    torch.manual_seed(0)
    case = Case("counting", Counting(scaled).double(), (torch.randn(8, 4, dtype=torch.float64),))
    module = ap.parallelize(
        case.model, case.args, mode="propagate", backend="virtual", check=True, **options
    )
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    assert module.steps == 3
