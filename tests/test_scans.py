"""Linear recurrences: one operator, cut along time as along all else; loops over time become it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from tests.capture.support import program, random, targets, text
from tests.models import Case
from tests.parity import assert_parity

WAYS = {"time": (None, "sp", None), "batch": ("sp", None, None), "channels": (None, None, "sp")}


class Layer(nn.Module):
    """Decays that follow from what is read, and a start that is learnt."""

    def __init__(self, cut: tuple[str | None, ...], has_start: bool = True) -> None:
        super().__init__()
        self.decay, self.out = nn.Linear(4, 6), nn.Linear(6, 4)
        self.start = nn.Parameter(torch.randn(6)) if has_start else None
        cuts = (cut, cut, cut[2:])[: 3 if has_start else 2]
        self.scan: Any = ap.shard(ap.nn.linear_scan, cuts)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.decay(x)
        states = self.scan(logits.sigmoid(), logits, self.start, dim=1)
        return (x + self.out(states)).square().mean()


class StateSpace(nn.Module):
    """As transformers writes it where it has no kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.enter, self.select = nn.Linear(6, 6), nn.Linear(6, 1 + 2 * 3)
        self.decays = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        length, u = x.shape[1], self.enter(self.norm(x))
        step, b, c = self.select(u).split((1, 3, 3), -1)
        step = F.softplus(step).transpose(1, 2)[..., None]
        a = torch.exp(-self.decays.exp()[None, :, None, :] * step)
        bu = step * b[:, None] * u.transpose(1, 2)[..., None]
        state, found = torch.zeros(len(x), 6, 3, dtype=x.dtype), []
        for at in range(length):
            state = a[:, :, at] * state + bu[:, :, at]
            found.append(torch.matmul(state, c[:, at, :].unsqueeze(-1))[:, :, 0])
        return (x + torch.stack(found, dim=-1).transpose(1, 2)).square().mean()


def case(model: nn.Module, *shape: int) -> Case:
    return Case("scan", model.double(), (random(*shape),))


def joints(module: ap.ParallelModule) -> list[str]:
    return [move.forward for move in module.plan.movements() if "scan" in move.forward]


@pytest.mark.parametrize("way", WAYS)
def test_cut(way: str) -> None:
    cut = WAYS[way]
    for ranks, length in ((2, 6), (3, 7)) if way == "time" else ((2, 6),):
        module = assert_parity(case(Layer(cut, ranks < 3), 2, length, 4), Mesh(sp=ranks))
        assert joints(module) == ["cut_linear_scan"] * (way == "time")


def test_loops_are_cut_along_time() -> None:
    """Only rows of state go from rank to rank, and no sequence is gathered."""
    made = case(StateSpace(), 2, 8, 6)
    made.model.norm = ap.shard(made.model.norm, ((None, "sp", None),))
    module = assert_parity(made, Mesh(sp=4))
    assert joints(module) == ["cut_linear_scan"]
    assert "all_gather" not in str(module.plan.movements())


def test_gradients_of_gradients() -> None:
    a, b = (random(2, 5, seed=seed).requires_grad_() for seed in (1, 2))
    start = random(2, seed=3).requires_grad_()

    def scan(*args: Tensor) -> Tensor:
        return ap.nn.linear_scan(*args, dim=-1)

    for given in ((a, b), (a, b, start)):
        assert torch.autograd.gradcheck(scan, given)
        assert torch.autograd.gradgradcheck(scan, given)


def test_few_digits_are_those_of_the_states() -> None:
    """Products of factors are in more of them."""
    a, b = (random(64, 3, seed=seed).sigmoid() for seed in (1, 2))
    exact = ap.nn.linear_scan(a, b, dim=0)
    few = ap.nn.linear_scan(a.bfloat16(), b.bfloat16(), dim=0)
    assert few.dtype == torch.bfloat16
    torch.testing.assert_close(few.double(), exact, rtol=0.02, atol=0.0)


@pytest.mark.parametrize(
    ("dim", "start", "rule"),
    [(2, None, "runs along a dim"), (0, torch.zeros(3, 2), "the start of a recurrence")],
)
def test_wrong_input(dim: int, start: Tensor | None, rule: str) -> None:
    with pytest.raises(ap.InvalidInput, match=rule):
        ap.nn.linear_scan(torch.ones(3, 2), torch.ones(3, 2), start, dim=dim)


def looped(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = self.linear(x).sigmoid(), self.linear(x)
    state, found = x[:, 0], []
    for at in range(1, x.shape[1]):
        state = b[:, at] + state * a[:, at]
        found.append(state.tanh() * 2)
    return torch.stack(found, 1), state + 1


def test_a_loop_is_one_operator() -> None:
    made = program(looped, random(2, 5, 4))
    assert targets(made).count("autopar.linear_scan") == 1
    assert len(targets(made)) == len(targets(program(looped, random(2, 9, 4))))


def with_other_states(self: Any, x: Tensor) -> Tensor:
    """Not linear in the state: the factor reads it, too."""
    state, found = torch.zeros_like(x[:, 0]), []
    for at in range(x.shape[1]):
        state = state.sigmoid() * state + self.linear(x[:, at])
        found.append(state)
    return torch.stack(found, 1)


def with_every_second(self: Any, x: Tensor) -> Tensor:
    """What is read is not one tensor, piece by piece."""
    state, found = torch.zeros_like(x[:, 0]), []
    for at in range(0, 4, 2):
        state = x[:, at] * state + self.linear(x)[:, at]
        found.append(state)
    return torch.stack(found, 1)


def from_a_number(self: Any, x: Tensor) -> Tensor:
    state, found = 0.0, []
    for at in range(x.shape[1]):
        state = x[:, at] * state + self.linear(x)[:, at]
        found.append(state)
    return torch.stack(found, 1)


def without_states(self: Any, x: Tensor) -> Tensor:
    return torch.stack([self.linear(x[:, at]) for at in range(x.shape[1])], 1)


@pytest.mark.parametrize(
    "function", [with_other_states, with_every_second, from_a_number, without_states]
)
def test_loops_that_stay(function: Any) -> None:
    """And are exact, as `program` sees to."""
    made = text(function, random(2, 4, 4))
    assert "scan" not in made
    assert "stack" in made
