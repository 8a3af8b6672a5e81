"""A loop over the experts that are chosen is followed once, and is that of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput
from tests import mixtures

Body = Callable[[Any, Tensor, Any, Any, Any, Tensor], None]


class Looped(nn.Module):
    """A mixture whose experts take their tokens one after the other, as `body` says."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.router, self.body = nn.Linear(4, 5), body
        self.up, self.bias = nn.Parameter(torch.randn(5, 4, 12)), nn.Parameter(torch.randn(5, 12))
        self.down = nn.Parameter(torch.randn(5, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, -2)
        gates, chosen = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, num_classes=5).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == 5:
                continue
            choice, token = torch.where(mask[expert])
            self.body(self, x[token], expert, (token, choice), gates, y)
        return y.view(shape).square().sum()


def _gated(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    gate, up = (x @ self.up[expert] + self.bias[expert]).chunk(2, dim=-1)
    rows = F.linear(F.silu(gate.clamp(max=3.0)) * (up + 1), self.down[expert])
    y.index_add_(0, at[0], rows * gates[at[0], at[1], None])


def _of_first_order(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    rows = torch.matmul(x.double().tanh(), self.up[expert].double())[:, :4]
    y.index_add_(0, at[0], (-rows).to(y.dtype) * gates[at].unsqueeze(-1))


def example(body: Body) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Looped(body).double(), (torch.randn(8, 3, 4, dtype=torch.float64),)


@pytest.mark.parametrize("body", [_gated, _of_first_order])
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=2, tp=2)},
        {"mesh": ap.Mesh(tp=3)},
        {"mesh": ap.Mesh(dp=2), "microbatches": 2},
    ],
    ids=str,
)
def test_it_is_that_of_the_model(body: Body, options: dict[str, Any]) -> None:
    assert ap.verify(*example(body), **options).ok


def _counts(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    y.add_(1.0)


def _asks(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    if x.shape[0]:
        _gated(self, x, expert, at, gates, y)


def _first(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    if expert == 0:
        _gated(self, x, expert, at, gates, y)


def _over_rows(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    y.index_add_(0, at[0], x - x.mean(0))


def _by_choice(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    y.index_add_(0, at[1], x)


def _with_others(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    y.index_add_(0, at[0], x * y[:1])


def _partly(self: Looped, x: Any, expert: Any, at: Any, gates: Tensor, y: Tensor) -> None:
    y.index_add_(0, at[0], x + y[at[0]])


@pytest.mark.parametrize(
    "body", [_partly, _counts, _asks, _first, _over_rows, _by_choice, _with_others]
)
def test_what_is_of_no_row_and_expert_is_refused(body: Body) -> None:
    with pytest.raises(InvalidInput, match="in a loop over experts") as error:
        capture(*example(body))
    assert "test_each.py" in str(error.value.source)


SEEN: list[int] = []
COUNT = 0


def _count() -> None:
    global COUNT
    COUNT += 1


class Ends(nn.Module):
    """Loops that leave something behind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Parameter(torch.randn(5, 4, 4))
        self.router, self.counts = nn.Linear(4, 5), {"hit": 0}

    def forward(self, x: Tensor) -> Tensor:
        y, count, seen = torch.zeros_like(x), 0, [0]
        mask = F.one_hot(self.router(x).topk(2)[1], 5).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            _, token = torch.where(mask[expert[0]])
            if self.kind == "count":
                count += 1
            if self.kind == "seen":
                seen.append(1)
            if self.kind == "held":
                self.counts["hit"] += 1
            if self.kind == "global":
                SEEN.append(1)
            if self.kind == "elsewhere":
                _count()
            rows = x[token] @ self.up[expert[0]]
            y.index_add_(0, token, rows)
            if self.kind == "break":
                break
        return y.sum() * (len(seen) + count) + (rows.sum() if self.kind == "rows" else 0)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("count", "count, which a loop over experts changes"),
        ("seen", "seen, which a loop over experts changes"),
        ("held", "self, which a loop over experts changes"),
        ("global", "SEEN, which a loop over experts changes"),
        ("elsewhere", "COUNT, which a loop over experts changes"),
        ("break", "does not come to its end"),
        ("rows", "behind a loop over experts"),
    ],
)
def test_what_a_loop_leaves_behind_is_refused(kind: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as error:
        capture(Ends(kind), (torch.randn(6, 4),))
    assert "test_each.py" in str(error.value.source)


class ByComprehension(nn.Module):
    """What is done with the experts besides is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        mask = F.one_hot(self.router(x).topk(2)[1], 5).permute(2, 1, 0)
        hit = (mask.sum((-1, -2)) > 0).nonzero()
        return x.sum() * len([expert[0] for expert in hit])


def test_a_loop_that_is_no_statement_is_refused() -> None:
    with pytest.raises(InvalidInput, match="by a for statement of its own"):
        capture(ByComprehension(), (torch.randn(6, 4),))


class Spare(Looped):
    """A mask that tells of an expert more than there are."""

    def __init__(self, kind: str) -> None:
        super().__init__(_gated)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).topk(2)
        gates /= gates.sum(-1, keepdim=True)
        if self.kind == "left out":
            chosen = torch.where(gates < 0.1, 5, chosen)
        if self.kind == "written":
            chosen.view(-1)[:1] = 5
        chosen = chosen.clone() if self.kind == "copied" else chosen
        mask = F.one_hot(chosen, num_classes=6).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            expert = expert[0]
            if expert == 5:
                continue
            choice, token = torch.where(mask[expert])
            self.body(self, x[token], expert, (token, choice), gates, y)
        return y.square().sum()


@pytest.mark.parametrize("kind", ["plain", "copied"])
def test_an_expert_that_cannot_be_chosen_is_none(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64)
    assert ap.verify(Spare(kind).double(), (x,), mesh=ap.Mesh(dp=2, tp=2)).ok


def test_experts_that_cannot_be_chosen_have_weights() -> None:
    model, x = Spare("plain"), torch.randn(8, 4, dtype=torch.float64)
    for name in ("up", "bias", "down"):
        held = getattr(model, name)
        setattr(model, name, nn.Parameter(torch.cat([held, held[:1]])))
    assert ap.verify(model.double(), (x,), mesh=ap.Mesh(dp=2)).ok


@pytest.mark.parametrize("kind", ["left out", "written"])
def test_an_expert_that_may_be_chosen_is_asked_for(kind: str) -> None:
    with pytest.raises(InvalidInput, match="which expert it is, in a loop over experts") as error:
        capture(Spare(kind), (torch.randn(8, 4),))
    assert "if expert == 5" in str(error.value.source)


def test_a_mixture_of_transformers_one_expert_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = mixtures.family("Mixtral", monkeypatch)
    case.model.config._experts_implementation = "eager"
    assert ap.verify(case.model, case.args, case.kwargs, mesh=ap.Mesh(dp=2, tp=2)).ok
