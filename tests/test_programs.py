"""One set of parameters, many programs: modes, batches, lengths, dtypes and signatures."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests import signatures
from tests.outputs import assert_close, gradients, made, random
from tests.pipeline.models import share_captures  # noqa: F401

WAYS: dict[str, dict[str, Any]] = {
    "propagate": {},
    "auto, zero2": {"mode": "auto", "mesh": ap.Mesh(dp=2, tp=2), "states": "zero2"},
    "data, zero3": {"mode": "data", "mesh": ap.Mesh(dp=3), "states": "zero3"},
}


@pytest.mark.parametrize("law", signatures.LAWS)
@pytest.mark.parametrize("way", WAYS)
def test_every_program_is_the_model(law: Any, way: str) -> None:
    law(**WAYS[way])


STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "states": "zero1"},
    "chimera": {"mesh": ap.Mesh(pp=2), "schedule": "chimera"},
    "zb-v": {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "zb-v", "states": "zero3", "mode": "auto"},
}


@pytest.mark.parametrize("way", STAGED)
def test_every_program_goes_through_the_stages(way: str) -> None:
    signatures.goes_through_stages(**{"mode": "propagate", "microbatches": 4, **STAGED[way]})


def test_programs_are_listed_and_many_are_told_of() -> None:
    x = torch.ones(12, 4)
    module = ap.parallelize(nn.Linear(4, 4), (x,), mesh=ap.Mesh(dp=2), mode="data")
    for size in range(2, 9):
        module(x[:size])
    with pytest.warns(UserWarning, match="9 programs were made of this module"):
        module(x[:9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x[:10])
    assert len(module.programs) == 10
    lines = str(module.programs).splitlines()
    assert lines[0].split() == ["call", "mode", "micro-batches", "mesh"]
    assert "(f32[2, 4])" in lines[2]
    assert module.programs[1].plan.original.graph is not module.plan.original.graph
    module.close()
    with pytest.raises(ap.InvalidInput, match="a closed module"):
        len(module.programs)


def test_a_call_without_gradients_keeps_nothing() -> None:
    """Of what lives only as long as something is kept for backward: the values inside."""
    noted: list[weakref.ref[torch.Tensor]] = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            found = function(*args, **(kwargs or {}))
            for value in found if isinstance(found, tuple | list) else (found,):
                if isinstance(value, torch.Tensor):
                    noted.append(weakref.ref(value))
            return found

    _, module = signatures.start(states="zero3")
    x, _ = signatures.ids()
    kept = {}
    for without in (nullcontext, torch.no_grad, torch.inference_mode):
        noted.clear()
        with Noting(), without():
            found = module.eval()(x)
        known = {None, found, x, *module.parameters(), *module.buffers()}
        kept[without] = [one for one in noted if one() not in known]
    assert kept.pop(nullcontext)
    assert not any(kept.values())


def test_making_a_program_draws_no_random_numbers() -> None:
    _, module = signatures.start()
    x, y = signatures.ids(4)
    before = torch.get_rng_state()
    module.eval()(x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    one = module.train().step(x, labels=y)
    torch.manual_seed(1)
    assert torch.equal(module.step(x, labels=y), one)


def test_micro_batches_of_another_batch_are_those_that_divide_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 6).double(), nn.Linear(6, 5).double()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.two(torch.tanh(self.one(x))), y)

    model, (x, y) = made(Model), (random(8, 4), torch.arange(8) % 5)
    options: dict[str, Any] = {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero1"}
    module = ap.parallelize(copy.deepcopy(model), (x, y), microbatches=4, **options)
    for batch, count in ((8, 4), (6, 3), (5, 1), (4, 4)):
        for one in (model, module):
            one.zero_grad()
        loss = model(x[:batch], y[:batch])
        loss.backward()
        assert_close(module.step(x[:batch], y[:batch]), loss.detach())
        assert_close(module(x[:batch], y[:batch]), loss)
        assert_close(module.full_grads(), gradients(model))
        steps = [one.plan.microbatches for one in module.programs if one.for_steps]
        assert steps[-1] == count


class Twice(nn.Module):
    """A module that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.again = nn.Sequential(self.norm, self.first)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again[0](self.norm(self.again[1](x)))).square().mean()


def test_a_module_of_two_names_is_one() -> None:
    model, x = made(Twice), random(8, 4)
    module = ap.parallelize(copy.deepcopy(model), (x,), mesh=ap.Mesh(dp=2), mode="data")
    assert module.again[0] is module.norm
    assert module.again[1] is module.first
    assert module.state_dict().keys() == model.state_dict().keys()
    for one in (model, module):
        one.again[0].eval()
    with torch.no_grad():
        assert_close(module(x), model(x))


def test_batch_norm_of_another_program_in_micro_batches_is_told() -> None:
    model, x = made(Twice).eval(), random(8, 4)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), mode="data", microbatches=2)
    module.train()
    with pytest.warns(UserWarning, match="takes its statistics over each of 2 micro-batches"):
        module.step(x)


class Gamma(nn.Module):
    """Draws in training what is not drawn by place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            y = y * torch._standard_gamma(torch.ones_like(x))
        return y.square().mean()


def test_another_program_is_refused_as_the_first_would_be() -> None:
    model, x = made(Gamma).eval(), random(8, 4)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), mode="data")
    before = module(x)
    with pytest.raises(ap.InvalidInput, match="a random operator runs on one rank only"):
        module.train()(x)
    assert_close(module.eval()(x), before)


@torch.library.custom_op("tests_programs::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Without a rule."""
    return x * 2


twice.register_fake(torch.empty_like)


class TwiceInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).square().mean()
        return y if self.training else twice(y)


def test_a_strict_plan_is_strict_of_every_program(tmp_path: Path) -> None:
    model, x = made(TwiceInEvaluation), random(8, 4)
    ap.plan(model, (x,), mesh=ap.Mesh(dp=2), mode="data", strict=True).save(tmp_path / "plan")
    module = ap.parallelize(model, (x,), plan=ap.Plan.load(tmp_path / "plan"))
    module.step(x)
    with torch.no_grad(), pytest.raises(ap.InvalidInput, match="every operator has a rule"):
        module.eval()(x)
    assert len(module.programs) == 1


def test_progress_is_told_of_later_programs() -> None:
    told: list[str] = []
    x = random(8, 4)
    about = {"mesh": ap.Mesh(dp=2), "mode": "auto"}
    module = ap.parallelize(
        made(TwiceInEvaluation), (x,), progress=lambda phase, _: told.append(phase), **about
    )
    first, told[:] = {*told}, []
    module.step(x)
    assert not told
    with torch.no_grad():
        module.eval()(x)
    assert told[0] == "capture"
    assert {*told} == first - {"plan"}
