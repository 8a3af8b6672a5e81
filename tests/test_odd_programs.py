"""Small programs with something odd in them: each computes what one device computes, or is refused.

Ends of a count that are tensors, tensors of no size and of no dims, ranks without rows, modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.models import Case
from tests.parity import assert_parity


class Odd(nn.Module):
    """A linear layer, another parameter, and a loss made of both by a function."""

    def __init__(self, loss: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.loss = loss
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.other = nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.loss(self.linear(x), self.other, *rest)


def rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def attention(h: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).square().sum()


def norm_of_order_zero(h: Tensor, w: Tensor) -> Tensor:
    return (h * w).sum() * torch.linalg.vector_norm(h, 0)


def twice(h: Tensor, w: Tensor) -> Tensor:
    y = F.linear(h[0], w)
    return (y + y).square().sum()


PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "a count between tensors": (
        lambda h, w: (h * torch.linspace(w.sum(), w.sum() + 1, 4)).sum(),
        (2,),
        (6, 4),
    ),
    "a product twice in a sum": (twice, (3, 4), (6, 4)),
    "the mean of a number": (lambda h, w: (h * w).sum().mean(0) + h.sum().mean(-1), (4,), (6, 4)),
    "a parameter without elements": (lambda h, w: h.square().sum() + (h @ w).sum(), (4, 0), (6, 4)),
    "a norm of order zero alone": (
        lambda h, w: h.sum() + (h.detach() * w).norm(0) + torch.linalg.norm(w * 2, 0),
        (4,),
        (6, 4),
    ),
    "a norm of order zero": (norm_of_order_zero, (4,), (6, 4)),
    "a value written over": (
        lambda h, w: (h + w).zero_().sum() + h.square().sum() + h.clone().fill_(2.0).sum(),
        (4,),
        (6, 4),
    ),
    "a learned mask": (attention, (5, 5), (5, 2, 5, 4)),
    "a subscript of size one": (
        lambda h, w: torch.einsum("bi,bj->ij", h, w).square().sum(),
        (1, 3),
        (6, 4),
    ),
    "scales of instance norm": (
        lambda h, w: F.instance_norm(h, weight=w, bias=w).pow(3).sum(),
        (5,),
        (5, 5, 4),
    ),
    "a transform of few rows": (lambda h, w: (torch.fft.rfft(h * w).abs()).sum(), (4,), (5, 4)),
    "pools of few rows": (
        lambda h, w: (F.max_pool1d(h * w, 2) + F.avg_pool1d(h, 2)).square().sum(),
        (4,),
        (5, 3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "propagate"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parity_of_odd_programs(name: str, mode: str) -> None:
    loss, shape, inputs = PROGRAMS[name]
    for ranks in (3, 4):
        assert_parity(Case("odd", Odd(loss, *shape), (rows(*inputs),)), ap.Mesh(x=ranks), mode=mode)


class Table(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], frozen: bool) -> None:
        super().__init__()
        self.table = kind(5, 4, sparse=True, dtype=torch.float64).requires_grad_(not frozen)
        self.linear = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.table(ids)).sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: Callable[..., nn.Module]) -> None:
    ids = torch.tensor([[0, 1], [2, 2], [4, 0], [3, 3]])
    with pytest.raises(ap.AutoparError, match="so is every gradient") as caught:
        ap.plan(Table(kind, frozen=False), (ids,), mesh=ap.Mesh(x=2))
    assert "sparse gradient" in str(caught.value.got)
    if kind is nn.Embedding:
        assert_parity(Case("frozen", Table(kind, frozen=True), (ids,)), ap.Mesh(x=2))


def test_sparse_tensors_are_refused() -> None:
    model = Odd(lambda h, w: torch.sparse.mm(h.to_sparse(), w).sum(), 4, 4)
    with pytest.raises(
        ap.AutoparError, match="every tensor of a captured model is dense"
    ) as caught:
        ap.plan(model, (rows(6, 4),), mesh=ap.Mesh(x=2))
    assert "h.to_sparse()" in (caught.value.source or "")


def test_inference_mode_around_training() -> None:
    model, x = Odd(lambda h, w: (h * w).sum(), 4), rows(6, 4)
    with torch.inference_mode():
        module, made_inside = ap.parallelize(model, (x,), mesh=ap.Mesh(x=2)), x.clone()
        module.step(x)
        assert not module(x).requires_grad
    first = module.full_grads()
    assert set(first) == {"linear.weight", "linear.bias", "other"}
    module.zero_grad()
    module.step(made_inside)
    for name, grad in module.full_grads().items():
        torch.testing.assert_close(grad, first[name])


def test_inputs_without_data_are_refused() -> None:
    module = ap.parallelize(Odd(lambda h, w: (h * w).sum(), 4), (rows(6, 4),), mesh=ap.Mesh(x=2))
    for run in (module, module.step):
        with pytest.raises(ap.AutoparError, match="needs inputs with data"):
            run(torch.empty(6, 4, dtype=torch.float64, device="meta"))


def test_an_argument_that_is_not_a_number_is_itself() -> None:
    def scaled(h: Tensor, w: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(h, h * w, h, scale=scale).sum()

    x = rows(3, 5, 4)
    module = ap.parallelize(Odd(scaled, 4), (x, math.nan), mesh=ap.Mesh(x=3))
    assert module.step(x, float("nan")).isnan()
    assert len(module.programs) == 1
    assert not module.step(x, 0.5).isnan()
