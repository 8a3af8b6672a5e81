"""Functions of one element that run over all: FlexAttention, and a vmap by another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, vmap
from torch.autograd import Function
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autopar as ap
from autopar import Mesh
from autopar.capture import capture
from autopar.errors import InvalidInput
from tests.capture.support import program, random, targets
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome

LENGTH, HEADS = 7, 4
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1])
Mod = Callable[..., Any]


def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])


def partly(x: Tensor, slopes: Tensor, head: Tensor) -> Tensor:
    with torch.no_grad():
        factor = torch.tanh(x) * slopes[head]
        with torch.enable_grad():
            x = x * 2
    return x * factor


def held(x: Tensor, slopes: Tensor) -> Tensor:
    return 2 * x * (torch.tanh(x) * slopes).detach()


class Attention(nn.Module):
    """`mod` and `sees` are functions as FlexAttention has them; `added` what `mod` does to all
    scores at once, as it is written without it."""

    def __init__(self, mod: Mod, added: Mod, sees: Any, attend: Any = flex_attention) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.randn(HEADS))
        self.mod, self.added, self.sees, self.attend = mod, added, sees, attend
        self.is_flex = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = [f(y).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        out = self.flexible(*parts) if self.is_flex else self.written_out(*parts)
        return out.square().mean()

    def flexible(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def mod(score: Tensor, *places: Tensor) -> Tensor:
            return self.mod(self, q, score, *places)

        blocks = self.sees and create_block_mask(self.sees, None, None, LENGTH, LENGTH, "cpu")
        found = self.attend(q, k, v, score_mod=mod, block_mask=blocks, enable_gqa=True)
        assert isinstance(found, Tensor)
        return found

    def written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        scores = self.added(self, q, q @ k.mT / 2, i, j)
        if self.sees:
            scores = scores.masked_fill(~self.sees(i, i, i, j), -torch.inf)
        return scores.softmax(-1) @ v


Pair = tuple[Mod, Mod, Any]
CASES: dict[str, Pair] = {
    "documents": (lambda m, q, s, b, h, i, j: s, lambda m, q, s, i, j: s, same_document),
    "learnt slopes": (
        lambda m, q, s, b, h, i, j: s + m.slopes[h] * (i - j),
        lambda m, q, s, i, j: s + m.slopes[:, None, None] * (i - j),
        same_document,
    ),
    "capped scores": (
        lambda m, q, s, b, h, i, j: 2 * torch.tanh(s / 2),
        lambda m, q, s, i, j: 2 * torch.tanh(s / 2),
        same_document,
    ),
    "partly without gradients": (
        lambda m, q, s, b, h, i, j: s * m.slopes[h] * partly(s, m.slopes, h),
        lambda m, q, s, i, j: s * m.slopes[:, None, None] * held(s, m.slopes[:, None, None]),
        same_document,
    ),
    "slopes without gradients": (
        lambda m, q, s, b, h, i, j: s + partly(j, m.slopes, h) * m.slopes[h],
        lambda m, q, s, i, j: s + held(j, m.slopes[:, None, None]) * m.slopes[:, None, None],
        None,
    ),
    "a table that is computed": (
        lambda m, q, s, b, h, i, j: q.mean(-1)[b][h][j] + s,
        lambda m, q, s, i, j: q.mean(-1)[:, :, None] + s,
        None,
    ),
}


def case(pair: Pair, *cut: str | None) -> Case:
    marked: Any = ap.shard(flex_attention, (cut,) * 3) if cut else flex_attention
    return Case("flex", Attention(*pair, marked).double(), (random(2, LENGTH, 8),))


@pytest.mark.parametrize("name", CASES)
def test_flex_attention(name: str) -> None:
    """Batch, heads and rows can be cut: functions are given places in the whole."""
    pair = CASES[name]
    plain = case(pair)
    plain.model.is_flex = False  # type: ignore[assignment]
    is_ring = name in ("documents", "learnt slopes", "slopes without gradients")
    cut = (None, "a", "b", None) if is_ring else ("a", "b", None, None)
    made = case(pair, *cut)
    module = ap.parallelize(
        made.model, made.args, mesh=Mesh(a=2, b=2), mode="propagate", backend="virtual"
    )
    assert_equal(parallel_outcome(module, made), single_outcome(plain))
    ways = map(str, module.plan.decisions.strategies.values())
    assert any("ring@b" in way for way in ways) == is_ring


class Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_gradient_by_hand_is_refused() -> None:
    def rounded(model: Any, q: Tensor, score: Tensor, *places: Tensor) -> Any:
        return Rounded.apply(score)

    with pytest.raises(InvalidInput, match="one written by hand belongs to an operator") as error:
        capture(case((rounded, rounded, None)).model, inputs())
    assert "a function that FlexAttention calls" in str(error.value.got)
    assert "self.attend(" in str(error.value.source)


def test_what_is_known_of_a_mask_is_kept() -> None:
    """A causal one is a flag, and samples and heads that no function asks for have one mask."""
    causal = capture(case((*CASES["documents"][:2], lambda b, h, i, j: i >= j)).model, inputs())
    (call,) = (n for n in causal.graph.nodes if "scaled_dot" in n.name)
    assert call.args[3:6] == (None, 0.0, True)
    masked = capture(case(CASES["documents"]).model, inputs())
    (call,) = (n for n in masked.graph.nodes if "scaled_dot" in n.name)
    assert call.args[3].meta["val"].shape == (1, 1, LENGTH, LENGTH)


def inputs() -> tuple[Tensor]:
    return (random(2, LENGTH, 8),)


def test_few_digits_are_those_of_the_scores() -> None:
    """Scores and what is added to them are not rounded to the digits of queries."""
    model = case(CASES["learnt slopes"]).model.bfloat16()
    found = targets(capture(model, (random(2, LENGTH, 8).bfloat16(),)))
    assert "scaled_dot_product_attention" not in found


def mapped(self: Any, x: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        return self.linear(row).softmax(-1) @ row.detach().T * row.sum()

    return vmap(vmap(one), in_dims=1)(x)


def partly_without_gradients(self: Any, x: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        with torch.no_grad():
            most = self.linear(row).amax()
            with torch.enable_grad():
                row = row * self.linear.bias
        return row / most

    return torch.vmap(torch.vmap(one))(self.linear(x))


def in_place(self: Any, x: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        y = row * 1
        y[0] = 0.5
        return y.mul_(2)

    return vmap(one)(self.linear(x))


@pytest.mark.parametrize("function", [mapped, partly_without_gradients, in_place])
def test_mapped_functions(function: Any) -> None:
    """With the gradients that they have, as `program` sees to."""
    program(function, random(2, 3, 4, 4))


def test_what_cannot_be_mapped_has_its_line() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return vmap(F.dropout)(x).sum()  # of one element

    with pytest.raises(ap.AutoparError, match=r"test_mapped.py:\d+: return vmap"):
        capture(Dropped(), (random(2, 4),))
