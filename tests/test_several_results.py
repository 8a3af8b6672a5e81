"""Operators with several results: one call, one backward, whichever of its results are used."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.strategies.results import has_results, is_result
from tests.capture.support import random
from tests.strategies.rule_law import Case, check_all

aten = torch.ops.aten
SUBSETS = [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)]
calls = {"forward": 0, "backward": 0}


@torch.library.custom_op("several::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The scaled rows, and two numbers for each row."""
    calls["forward"] += 1
    return x * w, [(x * w).square().sum(-1), x.sum(-1) * 2]


@scaled.register_fake
def _(x: Tensor, w: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [x.new_empty(x.shape[:-1]) for _ in range(2)]


def keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, of_rows: Tensor | None, of_numbers: Any) -> tuple[Tensor, Tensor]:
    calls["backward"] += 1
    x, w = ctx.saved_tensors
    y, of_x = torch.zeros_like(x), torch.zeros_like(x)
    of_squares, of_sums = of_numbers or (None, None)
    if of_rows is not None:
        y = y + of_rows
    if of_squares is not None:
        y = y + 2 * x * w * of_squares[..., None]
    if of_sums is not None:
        of_x = of_x + 2 * of_sums[..., None]
    return of_x + y * w, (y * x).flatten(0, -2).sum(0)


scaled.register_autograd(gradients, setup_context=keep_inputs)
ap.register_rule("several::scaled", "... h!, h! -> ... h!, ..., ...", saved="0 1")


class Used(nn.Module):
    """Uses some results of an operator with three."""

    def __init__(self, used: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = used
        self.up, self.down = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64) + 0.5)

    def results(self, h: Tensor) -> list[Tensor]:
        rows, (squares, sums) = scaled(h, self.scale)
        return [rows, squares[:, None], sums[:, None]]

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        found = self.results(h)
        h = sum((found[place] * (place + 1) for place in self.used), h)
        return self.down(h.tanh()).square().mean()


class Grouped(Used):
    def results(self, h: Tensor) -> list[Tensor]:
        out = aten.native_group_norm(h, self.scale, None, len(h), 6, 1, 2, 1e-5)
        return [out[0], *(value.repeat_interleave(3, 1) for value in out[1:])]


class Ranked(Used):
    def results(self, h: Tensor) -> list[Tensor]:
        values, places = (h * self.scale).topk(6)
        normed, mean, inverse = torch.native_layer_norm(h, (6,), self.scale, None, 1e-5)
        return [values + places, normed * mean, inverse]


def check(model: nn.Module, **options: Any) -> ap.ParallelModule:
    x = random(12, 4)
    expected = model(x)
    model.zero_grad()
    expected.backward()
    module = ap.parallelize(model, (x,), backend="virtual", check=True, **options)
    torch.testing.assert_close(module.step(x), expected.detach(), rtol=1e-9, atol=0)
    grads = module.full_grads()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    return module


# Each subset somewhere, and each place with one that leaves some out.
WAYS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((0,), {"mesh": ap.Mesh(x=3)}),
    ((1, 2), {"mesh": ap.Mesh(dp=2, tp=2)}),
    ((0, 1, 2), {"mesh": ap.Mesh(dp=2, tp=2), "mode": "propagate"}),
    ((1,), {"mesh": ap.Mesh(x=2), "mode": "data", "microbatches": 2}),
    ((0, 2), {"mesh": ap.Mesh(pp=2, dp=2), "mode": "data", "microbatches": 4, "schedule": "1f1b"}),
    ((0, 1), {"mesh": ap.Mesh(pp=2), "mode": "data", "microbatches": 4, "schedule": "zb-h1"}),
    ((2,), {"mesh": ap.Mesh(pp=2), "mode": "data", "microbatches": 4, "schedule": "zb-h1"}),
]


@pytest.mark.parametrize(("used", "options"), WAYS, ids=str)
def test_a_user_s_rule_is_kept_whatever_is_used(used: Any, options: dict[str, Any]) -> None:
    check(Used(used), strict=True, **options)


@pytest.mark.parametrize("kind", [Grouped, Ranked])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_statistics_have_the_gradients_that_torch_gives(kind: Any, used: tuple[int, ...]) -> None:
    parts = 3 if kind is Ranked else 1
    check(kind(used), mesh=ap.Mesh(x=2), mode="data", microbatches=parts)


@pytest.mark.parametrize("used", SUBSETS, ids=str)
def test_the_law_for_each_subset_of_results(used: tuple[int, ...]) -> None:
    operator = torch.ops.several.scaled.default
    rule = check_all(
        Case("scaled", operator, (random(5, 4, 3), random(3, seed=2)), used=used),
        ap.Mesh(a=2),
        ap.Mesh(a=3),
        ap.Mesh(a=2, b=2),
    )
    assert len(rule.strategies(ap.Mesh(a=2))) == 3
    layer_norm = (random(5, 3, 4), [4], random(4, seed=2), random(4, seed=3), 1e-5)
    check_all(Case("norm", aten.native_layer_norm.default, layer_norm, used=used), ap.Mesh(a=2))


def test_each_rank_calls_the_operator_once() -> None:
    module = check(Used((0, 1, 2)), mesh=ap.Mesh(x=3), mode="data")
    calls.update(forward=0, backward=0)
    module.step(random(12, 4))
    assert calls == {"forward": 3, "backward": 3}


def test_results_cross_stages_one_by_one() -> None:
    module = check(Used((0, 2)), mesh=ap.Mesh(pp=2), microbatches=2, mode="data")
    for stage in module.program.stages:
        for name in (*stage.sends, *stage.receives):
            node = next(n for n in stage.graph.nodes if n.name == name)
            assert isinstance(node.meta["val"], Tensor)


def test_results_are_written_saved_and_explained(tmp_path: Path) -> None:
    model, x = Used((0, 1)), random(12, 4)
    module = check(model, mesh=ap.Mesh(x=2), mode="data")
    text = str(module.graph)
    assert "f64[12@x, 6], f64[12@x], f64[12@x]" in text
    assert "result(several_scaled, 1)" in text
    explained = str(module.plan.explain("several_scaled"))
    assert str(module.plan.explain("result")) == explained
    assert "f64[12@x, 6], f64[12@x], f64[12@x]" in explained
    module.plan.save(tmp_path / "plan.json")
    again = ap.parallelize(model, (x,), plan=ap.Plan.load(tmp_path / "plan.json"))
    torch.testing.assert_close(again.step(x), module.step(x), rtol=0, atol=0)


def test_the_price_of_a_call_is_counted_once() -> None:
    graph = check(Used((0, 1, 2)), mesh=ap.Mesh(x=2), mode="data").program.graph
    assert len([node for node in graph.nodes if has_results(node) and node.meta["calls"]]) == 1
    assert not [node for node in graph.nodes if is_result(node) and node.meta.get("calls")]


def lists(h: Tensor) -> Tensor:
    counts, edges = torch.histogramdd(h[:, :2].detach(), [2, 3], range=[-2.0, 2.0, -2.0, 2.0])
    tripled, doubled = torch._foreach_mul([h, h], [3.0, 2.0])
    first, second = torch.gradient(h, dim=(0, 1))
    left, right = torch.hsplit(h, 2)
    mantissa, exponent = torch.frexp(h.detach())
    same = torch.cat([right, left], 1) + tripled + doubled * first + second + mantissa * exponent
    return same + counts.sum() + edges[1].sum() + edges[0][0]


class Lists(Used):
    def results(self, h: Tensor) -> list[Tensor]:
        return [lists(h)]


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_lists_of_results() -> None:
    check(Lists((0,)), mesh=ap.Mesh(x=3), mode="data")


def test_pieces_whose_places_are_values_are_refused() -> None:
    model = Lists((0,))

    def results(h: Tensor) -> list[Tensor]:
        return [torch.tensor_split(h, torch.tensor([2]), dim=1)[0].sum()]

    model.results = results  # type: ignore[method-assign]
    with pytest.raises(ap.AutoparError, match="tensor_split"):
        ap.parallelize(model, (random(12, 4),), mesh=ap.Mesh(x=2), backend="virtual")
