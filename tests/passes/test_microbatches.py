"""Micro-batches: shares of the loss add up exactly, or the model is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar as ap
from autopar.capture import capture
from autopar.passes.microbatches import cut_batch
from tests.models import Case, bert, gpt, llama, mlp, padded, vit
from tests.parity import STEPS, assert_equal, parallel_outcome, single_outcome

CASES = {
    "mlp": mlp,
    "gpt": lambda: gpt(layers=1),
    "llama, padded on the left": lambda: padded(llama(layers=1), "left"),
    "bert, padded": lambda: padded(bert(layers=1)),
    "vit": lambda: vit(layers=1),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_step_is_that_of_the_whole_batch(make):
    case = make()
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
    """Compute any loss of the output of two linear layers."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x):
        return self.loss(self.second(self.layer(x)), x, self.layer.weight)


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
    "of rows by their numbers": lambda y, x, w: (
        y * (x > 0)[torch.arange(6)[:, None, None], torch.arange(4)][:, 0]
    ).sum(),
    "with copies for each sample": lambda y, x, w: (
        (y.view(12, 2) * w[:2, :2].repeat(6, 1)).square().mean()
    ),
    "in fresh memory": in_fresh_memory,
    "plus a number": lambda y, x, w: y.square().mean() + 1.0,
    "an affine form": lambda y, x, w: (y.square().mean() * 2 + 1) / 2,
    "minus a number": lambda y, x, w: y.square().mean() - 3,
    "a number minus it": lambda y, x, w: 3 - y.square().mean(),
    "a number many times": lambda y, x, w: torch.add(y.square().mean(), other=2, alpha=3),
    "a number for each feature": lambda y, x, w: (y.square().mean(0) + 1.0).sum(),
    "a coarse number": lambda y, x, w: y.square().mean() + torch.tensor(1.7, dtype=torch.bfloat16),
    "a number of singles": lambda y, x, w: y.square().mean() - torch.tensor(1.7),
    "a coarse regulariser": lambda y, x, w: y.square().mean() + w.detach().bfloat16().sum(),
    "terms of three precisions": lambda y, x, w: torch.stack(
        [y.square().mean(), w.detach().bfloat16().sum(), w.detach().float().sum()]
    ).sum(),
    "whole numbers": lambda y, x, w: y.square().mean() + torch.tensor(7),
    "a weighted mean": lambda y, x, w: torch.lerp(y.square().mean(), w.abs().sum(), 0.25),
    "a mean of terms": lambda y, x, w: torch.stack([y.square().mean(), w.square().sum()]).mean(),
    "a mean with inputs": lambda y, x, w: torch.stack([y.sum(), x.mean(), w.sum()]).mean(),
    "chosen by a flag": lambda y, x, w: torch.where(w.sum() > 1e3, w.sum(), y.square().mean()),
    "a learned scale": lambda y, x, w: torch.exp(-w[0, 0]) * y.square().mean() + w[0, 0],
    "targets ignored": lambda y, x, w: (
        F.cross_entropy(y, torch.where(x[:, 0] > 0, x.argmax(1), -100)) + 0.1 * w.square().sum() + 2
    ),
    "of each element": lambda y, x, w: (y / x.shape[0]).square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=1), "microbatches": 6},
        {"mesh": ap.Mesh(pp=2), "microbatches": 3, "schedule": "1f1b"},
    ],
    ids=["6", "pipeline"],
)
def test_losses_that_add_up(loss, options):
    torch.manual_seed(0)
    model = Head(loss).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    module = ap.parallelize(model, (x,), mode="propagate", backend="virtual", **options)
    expected = model(x)
    expected.backward()
    assert torch.allclose(module.step(x), expected.detach(), rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(module.full_grads()[name], parameter.grad, rtol=1e-9, atol=1e-15)


class CoarseScale(nn.Module):
    """Add a regulariser of a parameter in a coarser type than the loss has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        self.scale = nn.Parameter(torch.tensor([1.7, 0.3], dtype=torch.bfloat16))

    def forward(self, x):
        return self.layers(x).square().mean() + self.scale.square().sum()


@pytest.mark.parametrize("mesh", [ap.Mesh(dp=1), ap.Mesh(dp=2), ap.Mesh(pp=2)], ids=str)
def test_a_coarse_term_is_promoted_before_it_is_shared(mesh):
    torch.manual_seed(0)
    model, x = CoarseScale(), torch.randn(6, 4, dtype=torch.float64)
    module = ap.parallelize(
        model, (x,), mode="propagate", backend="virtual", mesh=mesh, microbatches=3
    )
    expected = model(x)
    expected.backward()
    assert torch.allclose(module.step(x), expected.detach(), rtol=1e-12)
    for name, parameter in model.named_parameters():
        found = module.full_grads()[name]
        torch.testing.assert_close(found, parameter.grad)  # to the digits of its type


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, x, w: y.sum().square(), "square is not linear in a sum over the batch"),
        (lambda y, x, w: y.square().mean().sqrt(), "sqrt is not linear"),
        (lambda y, x, w: y.sum() * y.square().sum(), "mul is not linear"),
        (lambda y, x, w: y.sum().clamp(min=0.5), "clamp is not linear"),
        (lambda y, x, w: y.sum() / y.sum().detach(), "not made of the inputs alone"),
        (lambda y, x, w: F.pad(y.mean()[None], (1, 1), value=2.0).sum(), "pad is not linear"),
        (lambda y, x, w: (y - y.mean(0)).square().sum(), "not made of the inputs alone"),
        (lambda y, x, w: y.max(), "samples"),
        (lambda y, x, w: (y @ y.t()).sum(), "micro-batches|whole batch|samples"),
        (lambda y, x, w: (y * x[torch.arange(6).flip(0)]).sum(), "index needs all samples"),
        (lambda y, x, w: y[torch.arange(5)].sum(), "samples"),
        (lambda y, x, w: w.square().sum(), "not a sum over the samples"),
        (lambda y, x, w: y, "returns its loss"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(loss, message):
    captured = capture(Head(loss).double(), (torch.randn(6, 4, dtype=torch.float64),))
    with pytest.raises(ap.InvalidInput, match=message):
        cut_batch(captured, 2)


def test_the_error_names_a_table_over_the_samples():
    def loss(y, x, w):
        return (y * torch.arange(len(x))[:, None]).sum()  # the line

    captured = capture(Head(loss).double(), (torch.randn(6, 4, dtype=torch.float64),))
    with pytest.raises(ap.InvalidInput, match=r"a table \(6, .*over 6 samples is a const") as e:
        cut_batch(captured, 2)
    assert "as an input" in e.value.remedy
    assert e.value.source.endswith("# the line")


def test_the_error_names_where_samples_meet_before_a_table():
    """The advice for a table, to make it an input, would not help: samples meet elsewhere."""

    def loss(y, x, w):
        return F.cross_entropy(y @ y.T, torch.arange(len(x)))

    captured = capture(Head(loss).double(), (torch.randn(6, 4, dtype=torch.float64),))
    with pytest.raises(ap.InvalidInput, match="lets samples of different micro-batches meet") as e:
        cut_batch(captured, 2)
    assert "microbatches=1" in e.value.remedy
    assert "as an input" not in e.value.remedy


@pytest.mark.parametrize("count", [0, -1, 4, 1.5, True])
def test_numbers_of_micro_batches(count):
    captured = capture(Head(LOSSES["sum"]).double(), (torch.randn(6, 4, dtype=torch.float64),))
    with pytest.raises(ap.InvalidInput, match="micro-batches"):
        cut_batch(captured, count)


def normalised() -> Case:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)]

    class Normalised(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    return Case("normalised", Normalised(*layers).double(), (torch.randn(8, 4).double(),))


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": ap.Cluster.local(2, measure=False)},
        {"mesh": ap.Mesh(pp=2)},
        {"mesh": ap.Mesh(pp=2), "schedule": "1f1b"},
        {"mesh": ap.Mesh(pp=2), "mode": "propagate", "schedule": {"name": "zb-h1"}},
    ],
)
def test_batch_norm_is_not_cut_unasked(options):
    case = normalised()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = ap.parallelize(case.model, case.args, backend="virtual", progress=False, **options)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


@pytest.mark.parametrize("mesh", [ap.Mesh(pp=2), ap.Mesh(dp=2)])
def test_batch_norm_in_micro_batches_warns(mesh):
    case = normalised()
    with pytest.warns(UserWarning, match=r"batch norm \(1\) .* each of 4 micro-batches") as told:
        ap.plan(case.model, case.args, mesh=mesh, microbatches=4, progress=False)
    assert len(told) == 1


def test_a_schedule_that_needs_micro_batches_is_not_given_them_where_they_change_the_loss():
    case = normalised()
    options = {"mode": "propagate", "mesh": ap.Mesh(pp=2), "schedule": "chimera"}
    options["schedule_options"] = {"scale": "halving"}
    with pytest.raises(ap.InvalidInput, match="batch norm") as error:
        ap.plan(case.model, case.args, **options)
    assert "microbatches=4" in str(error.value)


class Read(nn.Module):
    """Read and write an integer buffer twice in a forward."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))

    def forward(self, x):
        y = self.first(x) + self.seen
        self.write(self.seen, x)
        y = self.second(y) * self.seen.clone()
        self.seen += x.shape[0]
        return y.square().mean() + self.seen.sum()


WRITES = [
    lambda seen, x: seen.add_(1),
    lambda seen, x: seen.copy_(2 * seen + (x > 0).sum(0)),
    lambda seen, x: seen[1:].copy_((x > 0).sum(0)[1:] * 3),
]


@pytest.mark.parametrize("write", WRITES)
def test_an_integer_buffer_is_read_and_written_twice(write):
    torch.manual_seed(0)
    case = Case("read", Read(write).double(), (torch.randn(8, 4, dtype=torch.float64),))
    module = ap.parallelize(
        case.model,
        case.args,
        mode="propagate",
        mesh=ap.Mesh(dp=2),
        backend="virtual",
        check=True,
        microbatches=2,
    )
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


class Counting(nn.Module):
    """Scale the loss by the number of the step; with `scaled=False` nothing reads the number."""

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
    assert module.steps == STEPS


def in_parts(y, x, w):
    first, second = y.unflatten(-1, (2, 2)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    return (first * second).sum()


def test_a_micro_batch_is_a_program_of_its_own():
    model, x = Head(in_parts).double(), torch.randn(8, 4, dtype=torch.float64)
    assert ap.verify(model, (x,), mesh=ap.Mesh(dp=2), microbatches=2, mode="propagate").ok


def test_a_share_of_several_parts_comes_back_where_it_was():
    model, x = Head(lambda y, x, w: (y.sum(), y)), torch.arange(48.0).view(12, 4)
    captured = capture(model, (x,), {})
    batches = cut_batch(captured, 3, with_outputs=True)
    (name,) = batches.cut
    taken = batches.split({name: x}, parts={name: 2})
    rows = [(one[name][:, 0] / 4).tolist() for one in taken]
    assert rows == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    shares = [[torch.zeros(()), one[name]] for one in taken]
    _, back = batches.join(shares, [0, 1], parts=2)
    assert torch.equal(back, x)
