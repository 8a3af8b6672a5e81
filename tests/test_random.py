"""The random law: an element draws the same bits on every layout, in every order of the work."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar as ap
from autopar.strategies import registry
from autopar.strategies.node_info import info
from autopar.verification import captured_draws
from tests import models
from tests.captures import shared_captures
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome

WIDTH = 8


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.scale
        total = (F.dropout(torch.ones_like(x), 0.5) * x).sum()
        heads = (x * 0).view(*x.shape[:2], 2, WIDTH // 2).transpose(1, 2)
        # Equal weights: what is left of each row counts how many were kept.
        kept = F.scaled_dot_product_attention(heads, heads, heads + 4.0, dropout_p=0.5)
        total = total + (kept.transpose(1, 2).reshape(x.shape) * x).sum()
        return x, total + (torch.rand_like(x) * 1024).floor().mul(x).sum()


class Counted(nn.Module):
    """Its loss tells every bit that is drawn: sums of whole numbers, exact in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x, part = layer(x)
            total = total + part
        return total


def counted() -> Case:
    numbers = torch.randint(2**20, (8, 4, WIDTH), generator=torch.Generator().manual_seed(0))
    return Case("counted", Counted(), (numbers.double(),))


WAYS: dict[str, dict[str, Any]] = {
    "data": {"mesh": ap.Mesh(dp=4), "mode": "data"},
    "uneven": {"mesh": ap.Mesh(dp=3), "mode": "data"},
    "auto": {"mesh": ap.Mesh(a=2, b=2), "mode": "auto"},
    "two batches": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2},
    "four batches": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 4},
    "full": {"mesh": ap.Mesh(dp=2), "mode": "data", "recompute": "full"},
    "selective": {"mesh": ap.Mesh(dp=2), "mode": "data", "recompute": "selective"},
    "1f1b": {"mesh": ap.Mesh(dp=2, pp=2), "schedule": "1f1b", "microbatches": 4},
    "chimera": {"mesh": ap.Mesh(pp=4), "schedule": "chimera", "microbatches": 4},
    "zb-v": {"mesh": ap.Mesh(pp=2), "schedule": "zb-v", "microbatches": 4, "recompute": "full"},
}
CUTS = {"tokens": {1: "a"}, "features": {2: "a"}, "both": {0: "b", 2: "a"}, "nested": {0: "a b"}}


def of_way(options: dict[str, Any]) -> dict[str, Any]:
    if "schedule" in options:
        return {"mode": "data", "pipeline": "pp", **options}
    return options


def losses(case: Case, steps: int = 3, **options: Any) -> list[float]:
    module = ap.parallelize(case.model, case.args, case.kwargs, **options)
    torch.manual_seed(3)
    return [float(module.step(*case.args, **case.kwargs)) for _ in range(steps)]


def test_bits_are_those_of_one_device() -> None:
    case = counted()
    with shared_captures():
        expected = losses(case, mesh=ap.Mesh(one=1))
        assert len(set(expected)) == len(expected)  # each step draws its own
        for name, options in WAYS.items():
            assert losses(case, **of_way(options)) == expected, name


@pytest.mark.parametrize("name", CUTS)
def test_bits_do_not_depend_on_what_is_cut(name: str) -> None:
    case = counted()
    expected = losses(case, mesh=ap.Mesh(one=1))
    dims = tuple(tuple(CUTS[name].get(dim, "").split()) for dim in range(3))

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = case.model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(ap.shard(x, tuple(dim or None for dim in dims)))

    module = ap.parallelize(Cut(), case.args, mesh=ap.Mesh(a=2, b=2), mode="propagate")
    torch.manual_seed(3)
    assert [float(module.step(*case.args)) for _ in range(3)] == expected
    cut = [layout for name, layout in module.plan.layouts.items() if name.startswith("dropout")]
    assert not all(layout.is_replicated for layout in cut)


def test_a_step_leaves_the_generator_as_it_does_on_one_device() -> None:
    case, states = counted(), []
    for options in ({"mesh": ap.Mesh(one=1)}, WAYS["data"], of_way(WAYS["1f1b"])):
        losses(case, steps=1, **options)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_what_draws_nothing_takes_none() -> None:
    case = models.gpt(dropout=0.2)
    module = ap.parallelize(case.model.eval(), case.args, mesh=ap.Mesh(dp=2), mode="data")
    before = torch.get_rng_state()
    module.step(*case.args)
    assert torch.equal(torch.get_rng_state(), before)


FAMILIES: dict[str, Callable[..., Case]] = {
    **{"gpt": models.gpt, "gpt2": models.gpt2, "llama": models.llama},
    **{"bert": models.bert, "t5": models.t5, "vit": models.vit},
}
ASKED: dict[str, dict[str, Any]] = {
    "dp2.tp2": {"mesh": ap.Mesh(dp=2, tp=2), "mode": "auto"},
    "zero3": {"mesh": ap.Mesh(dp=4), "mode": "data", "states": "zero3", "recompute": "full"},
    "1f1b": {"mesh": ap.Mesh(dp=2, pp=2), "mode": "data", "schedule": "1f1b", "microbatches": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_models_train_alike_with_dropout(name: str) -> None:
    """On a mesh of two axes, and in pieces or in stages, by turns."""

    def outcome(**options: Any) -> Any:
        module = ap.parallelize(case.model, case.args, case.kwargs, **options)
        torch.manual_seed(4)
        return parallel_outcome(module, case)

    in_turn = list(FAMILIES).index(name) % 2
    case = FAMILIES[name](dropout=0.1, layers=1 + in_turn)
    with shared_captures():
        expected = outcome(mesh=ap.Mesh(one=1))
        for way in ("dp2.tp2", ("zero3", "1f1b")[in_turn]):
            assert_equal(outcome(**ASKED[way]), expected)


class Reading(nn.Module):
    """Attention with dropout, in the forms that torch takes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.project = form, nn.Linear(8, 32)
        self.table = nn.Parameter(torch.randn(2, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (8, 4)).transpose(1, 2)
        q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        how: dict[str, Any] = {"dropout_p": 0.4, "enable_gqa": True}
        if self.form == "flat":
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        elif self.form in ("rows", "rows in order"):  # the samples are the queries
            q, k, v = q[:, :, 0].transpose(0, 1), self.table, self.table
            how["is_causal"] = self.form == "rows in order"
        elif self.form == "weights for all":
            q, k, how = q[:1], k[:1], {"dropout_p": 0.4}
            q, v = q[:, :2], v * 1.0
        elif self.form == "keys":
            how["attn_mask"] = torch.arange(x.shape[1]) != 2
        elif self.form == "padding":
            how["attn_mask"] = (x[:, None, None, :, 0] > -1) | (torch.arange(x.shape[1]) == 0)
        return F.scaled_dot_product_attention(q, k, v, **how).square().mean()


@pytest.mark.parametrize(
    "form", ["flat", "rows", "rows in order", "weights for all", "keys", "padding", "grouped"]
)
def test_attention_draws_as_the_plain_model_does(form: str) -> None:
    torch.manual_seed(0)
    args = (torch.randn(8, 6, 8),)
    for microbatches in (1, 2) if form != "weights for all" else (1,):
        how = {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": microbatches}
        found = ap.verify(Reading(form), args, steps=1, **how)
        assert found.ok, str(found)


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "all is dropped": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.5),
    "all weights are": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0) + x,
    "nothing is there": lambda x: F.dropout(x[:0], 0.3).sum() + F.dropout(x, 0.3),
    "one order": lambda x: x[:, :1][:, torch.randperm(1)] + F.dropout(x, 0.3),
    "in place": lambda x: F.rrelu(x * 1, 0.1, 0.7, training=True, inplace=True),
}


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).square().mean()


@pytest.mark.parametrize("what", NOTHING)
def test_what_takes_no_numbers_is_followed(what: str) -> None:
    torch.manual_seed(0)
    how = {"mesh": ap.Mesh(dp=2), "mode": "data"}
    found = ap.verify(Of(NOTHING[what]), (torch.randn(8, 4, 8),), steps=1, **how)
    assert found.ok, str(found)


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "probabilities": lambda x: x * torch.bernoulli(x.detach() * 0 + 3),
    "weights": lambda x: x * torch.multinomial(x.detach().flatten(1) - 99, 3).sum(),
}


@pytest.mark.parametrize("what", BAD)
def test_what_torch_refuses_to_draw_by_is_refused(what: str) -> None:
    module = ap.parallelize(Of(BAD[what]), (torch.randn(8, 4, 8),), mesh=ap.Mesh(one=1))
    with pytest.raises(ap.InvalidInput, match=what):
        module.step(torch.randn(8, 4, 8))


@torch.library.custom_op(
    "tests_random::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise(x: Tensor) -> Tensor:
    return torch.randn_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("has_rule", [False, True])
def test_numbers_of_torchs_generator_are_those_of_one_rank(
    has_rule: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A rule says how an operator may be cut, and not that pieces draw what is of their places."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_RESOLVED", {})
    if has_rule:
        ap.register_rule("tests_random::noise", "... -> ...")
    model, args = Of(lambda x: x * noise(x)), (torch.randn(8, 4, 8),)
    for how in ({"mesh": ap.Mesh(dp=2)}, {"mesh": ap.Mesh(one=1), "microbatches": 2}):
        with pytest.raises(ap.InvalidInput, match="its bits would depend on the layout"):
            ap.parallelize(model, args, mode="data", backend="virtual", **how)
    module = ap.parallelize(model, args, mode="data", mesh=ap.Mesh(one=1))
    assert not recwarn.list
    (node,) = (node for node in module.plan.rewritten.nodes if "noise" in node.name)
    assert not any(facts.is_cheap for facts, _ in info(node).calls or ())  # nor made again


class Drawing(nn.Module):
    """Everything that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.project, self.mix = nn.Linear(16, 48), nn.Conv1d(6, 6, 1)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.4)
        self.alpha, self.feature_alpha = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)
        self.slopes = nn.RReLU()

    def block(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.drop(F.gelu(self.up(x)))))

    def rarely(self, x: Tensor) -> Tensor:
        dropped, mask = torch.native_dropout(x.sigmoid(), 0.2, True)
        y = dropped + mask * F.gumbel_softmax(x, dim=-1) + torch.poisson(x.sigmoid() * 3)
        y = y + torch.normal(x.tanh(), 0.1) + torch.normal(0.1, x.sigmoid())
        y = y + torch.normal(x[:, :1].tanh(), self.project.bias[:16].sigmoid())
        y = y + torch.empty_like(x).log_normal_(0.0, 0.1) + torch.empty_like(x).cauchy_().atan()
        y = y + torch.empty_like(x).geometric_(0.7) + x.clone().exponential_(0.5)
        y = y * torch.empty_like(x).bernoulli_(x.sigmoid()[:, :1])
        y = y + torch.empty_like(x).random_() * 1e-16 + torch.randint_like(x, 3)
        return y + torch.randint_like(x, torch.tensor(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False)
        q, k, v = (
            part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        read = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = self.channels(self.mix(x + read.transpose(1, 2).flatten(2)))
        x = self.slopes(self.feature_alpha(self.alpha(x)))
        x = F.dropout(x, 0.1) + torch.rand_like(x) * 0.1
        x = x + torch.rand(x.shape, dtype=x.dtype) * 0.1 + torch.randn(16, dtype=x.dtype) * 0.01
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) + torch.randn_like(x) * 0.1
        x = x + torch.empty_like(x).uniform_(-0.1, 0.1) + x.new_empty(8, 1, 1).bernoulli_()
        x = x + torch.randint(3, x.shape) * 0.01 + torch.empty_like(x).normal_(1.0, 0.1)
        x = x + torch.randn(16, dtype=torch.complex128).imag * 0.1
        x = x + self.rarely(x) * 0.01
        x = x[:, torch.randperm(6)]
        picked = torch.multinomial(x.detach().flatten(0, 1).softmax(-1), 3).double()
        return (x + 0.1 * picked.mean(-1).view(8, 6, 1) - y).square().mean()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        again = checkpoint(lambda x: F.dropout(self.first(x), 0.5), x, use_reentrant=False)
        return (F.dropout(again, 0.3) + self.second(x)).square().mean()


def test_a_call_is_known_by_the_generator_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator draws while the generator of the host stands still."""
    asked = list[torch.device]()

    def own(device: torch.device) -> Tensor:
        asked.append(device)
        return torch.get_rng_state()

    cuda, of_torch = torch.device("cuda", 0), torch.get_device_module
    module = SimpleNamespace(get_rng_state=own)
    monkeypatch.setattr(
        torch, "get_device_module", lambda of=None: module if of == cuda else of_torch(of)
    )
    monkeypatch.setattr(captured_draws, "_device_of", lambda *call: cuda)
    found = ap.verify(Twice(), (torch.randn(8, 8),), mesh=ap.Mesh(dp=2), mode="data", steps=1)
    assert found.ok, str(found)
    assert set(asked) == {cuda}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_plain_model_is_shown_to_draw_the_same(microbatches: int) -> None:
    """`verify` hands the same numbers to the plain model, where that runs twice, too."""
    torch.manual_seed(0)
    args = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    how = {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": microbatches}
    found = ap.verify(Drawing(), args, steps=2, **how)
    assert found.ok, str(found)
    lines = str(found).splitlines()
    assert "the plain one is given those that the program draws" in lines[2]
    assert lines[3].split(maxsplit=3) == ["plain,", "same", "draws", "captured      parallel"]
    assert len({len(line) for line in lines[3:6]}) == 1  # one table
    assert found.to_json()["draws"]
