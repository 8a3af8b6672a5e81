"""A plan runs on the program that it was made for; other modes make other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.base.schema import read, write
from autopar.capture import capture
from autopar.capture.fingerprint import fingerprint_of
from autopar.plans.plan import SavedPlan
from tests import models
from tests.parity import assert_equal, parallel_outcome, single_outcome

MESH = ap.Mesh(dp=2)
X = torch.arange(32.0, dtype=torch.float64).reshape(4, 8) / 32


class Block(nn.Module):
    """A model with one of everything that makes a program, besides names and shapes."""

    def __init__(
        self,
        act: Callable[[Tensor], Tensor] = torch.relu,
        scale: float = 2.0,
        constant: float = 1.0,
        baked: float = 1.0,
        tied: bool = False,
        frozen: bool = False,
        drop: float = 0.0,
        returned: Any = "loss",
        key: str = "loss",
        norm: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.drop = nn.Dropout(drop)
        self.register_buffer("level", torch.tensor(constant * 0 + 1.0, dtype=torch.float64))
        self.plain = torch.full((8,), constant, dtype=torch.float64)
        self.act, self.scale, self.baked = act, scale, baked
        self.returned, self.key, self.norm = returned, key, norm
        if tied:
            self.down.weight = self.up.weight
        self.up.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Any:
        hidden = self.drop(self.act(self.up(x)))
        if self.norm and self.training:
            hidden = hidden / hidden.detach().abs().max()
        y = self.down(hidden) * self.scale + self.plain * self.level
        y = y + torch.tensor([self.baked] * 8, dtype=torch.float64)
        return {self.key: y.square().mean(), "kind": self.returned}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"act": torch.tanh}, "tanh"),
    "scalar": ({"scale": 3.0}, "3.0"),
    "nan for a number": ({"scale": float("nan")}, "nan"),
    "attribute": ({"constant": 5.0}, "constant"),
    "tensor made in forward": ({"baked": 5.0}, "constant"),
    "tied": ({"tied": True}, "tied parameter down.weight"),
    "frozen": ({"frozen": True}, "up.weight"),
    "dropout": ({"drop": 0.5}, "dropout"),
    "what is returned": ({"returned": "other"}, "other"),
    "names of what is returned": ({"key": "cost"}, "cost"),
}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x))).square().mean()


def saved(plan: ap.Plan) -> SavedPlan:
    return SavedPlan.from_json(json.loads(json.dumps(SavedPlan.of(plan).to_json())))


@pytest.fixture(scope="module")
def planned() -> ap.Plan:
    return ap.plan(Block(), (X,), mesh=MESH, mode="data")


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_of_another_program_is_refused(planned: ap.Plan, name: str) -> None:
    change, named = OTHERS[name]
    for given in (planned, saved(planned)):
        with pytest.raises(ap.InvalidInput, match="a plan is for one model") as caught:
            ap.parallelize(Block(**change), (X,), plan=given)
        assert named in str(caught.value)
    other = fingerprint_of(capture(Block(**change), (X,)))
    assert planned.fingerprint.differences(other)  # the other way round


@pytest.mark.parametrize("change", [{}, {"scale": float("nan")}, {"norm": True}])
def test_the_same_program_is_accepted(change: dict[str, Any]) -> None:
    plan = ap.plan(Block(**change), (X,), mesh=MESH, mode="data")
    for given in (plan, saved(plan)):
        model = Block(**change)
        with torch.no_grad():
            model.up.weight.mul_(2)
            model.level.mul_(3)  # state, which a plan is not about
        loss = ap.parallelize(model, (X,), plan=given).step(X)
        torch.testing.assert_close(loss, model(X)["loss"].detach(), equal_nan=True)


def test_the_operator_that_differs_is_named_with_its_module_and_line() -> None:
    def layers(act: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), act), nn.Linear(8, 8)).double()

    plan = ap.plan(layers(nn.ReLU()), (X,), mesh=MESH, mode="data")
    with pytest.raises(ap.InvalidInput) as caught:
        ap.parallelize(layers(nn.GELU()), plan=plan)
    assert "gelu = gelu(" in str(caught.value)
    assert " in 0.1" in str(caught.value)
    assert "not relu = relu(" in str(caught.value)


def test_a_model_that_changed_after_planning_is_another() -> None:
    model = Block()
    plan = ap.plan(model, (X,), mesh=MESH, mode="data")
    module = ap.parallelize(model, plan=plan)
    before = module(X)["loss"]
    model.plain.add_(1)
    assert torch.equal(module(X)["loss"], before)
    with pytest.raises(ap.InvalidInput, match="constant"):
        ap.parallelize(model, plan=plan)
    model.plain.sub_(1)
    model.scale = 7.0
    with pytest.raises(ap.InvalidInput, match=r"7\.0"):
        ap.parallelize(model, plan=plan)


def test_fingerprints_tell_every_scalar_and_constant_of_a_program() -> None:
    """Law: a program with one number changed has another fingerprint; captured again, the same."""
    case = models.gpt(layers=1)
    captured = capture(case.model, case.args, case.kwargs)
    own = fingerprint_of(captured)
    again = fingerprint_of(capture(case.model, case.args, case.kwargs))
    assert own == again
    assert not own.differences(again)
    assert not own.differences(read(type(own), json.loads(json.dumps(write(own)))))
    for name, value in captured.constants.items():
        if value.numel():
            other = value.clone()
            other.view(-1)[-1] = not other.view(-1)[-1]
            changed = replace(captured, constants={**captured.constants, name: other})
            assert own.differences(fingerprint_of(changed))
    for node in captured.graph.nodes:
        for index, argument in enumerate(node.args):
            if node.op == "call_function" and isinstance(argument, float):
                node.update_arg(index, argument + 1)
                assert own.differences(fingerprint_of(captured))
                node.update_arg(index, argument)


# modes

MODE_MATTERS = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "an if in forward": lambda: Block(norm=True),
}


@pytest.mark.parametrize("name", MODE_MATTERS)
def test_another_mode_makes_a_program_if_it_is_another(name: str) -> None:
    model = MODE_MATTERS[name]().double().eval()
    module, one = (ap.parallelize(model, (X,), mesh=mesh) for mesh in (MESH, ap.Mesh(one=1)))
    assert not module.training
    for count, is_training in enumerate((False, True, False), 1):
        for each in (model, module, one):
            each.train(is_training)
        found = []
        for each in (module, one, model):
            torch.manual_seed(3)
            got = each(X)
            found.append(got["loss"] if isinstance(got, dict) else got)
        torch.testing.assert_close(found[0], found[1])
        if name != "dropout" or not is_training:
            torch.testing.assert_close(found[0], found[2])
        assert len(module.programs) == min(count, 2)


def test_a_step_of_a_pipeline_in_another_mode_is_another_program() -> None:
    module, one = (
        ap.parallelize(Stack(), (X,), mesh=mesh, mode="propagate")
        for mesh in (ap.Mesh(pp=2), ap.Mesh(one=1))
    )
    one.load_state_dict(module.full_state_dict())
    for is_training in (False, True, False):
        found = []
        for each in (module, one):
            each.get_submodule("drop").train(is_training)  # a child by itself
            torch.manual_seed(3)
            found.append(each.step(X))
        torch.testing.assert_close(*found)
    assert len(module.programs) == 2


def test_modes_that_change_no_operator_are_silent() -> None:
    case = models.gpt(layers=1)
    module = ap.parallelize(case.fresh().model, case.args, case.kwargs, mesh=MESH, mode="data")
    before = module.step(*case.args, **case.kwargs)
    module.zero_grad()
    module.eval()
    assert torch.equal(module.step(*case.args, **case.kwargs), before)
    module.train()
    module.zero_grad()
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
