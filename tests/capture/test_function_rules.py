"""A Function that nobody gave a rule is cut as it may be, and any cut of it is the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.strategies import rule_of
from tests.capture.function_cases import CASES, FunctionCase, Linear, Swish
from tests.strategies.rule_law import Case, check_all


class Calls(nn.Module):
    """Each argument is a parameter."""

    def __init__(self, case: FunctionCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = (torch.randn(shape, dtype=torch.float64) for shape in case.shapes)
        self.values = nn.ParameterList(0.5 * value for value in values)
        self.function: Any = case.function

    def forward(self, x: Tensor) -> Tensor:
        made = self.function.apply(*(value * x for value in self.values))
        results = made if isinstance(made, tuple) else (made,)
        return torch.stack([one.square().sum() for one in results]).sum()


def call_of(case: FunctionCase) -> tuple[Calls, Any]:
    model = Calls(case)
    captured = capture(model, (torch.ones((), dtype=torch.float64),))
    return model, next(n for n in captured.operators if "own_functions" in str(n.target))


def name_of(case: FunctionCase) -> str:
    return f"{case.function.__name__}-{len(case.shapes[0])}-{case.shapes[0][0]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_it_is_cut_where_it_may_be(case: FunctionCase) -> None:
    _, call = call_of(case)
    rule = rule_of(call)
    places = {
        (number, dim)
        for number, dims in enumerate(rule.inputs if rule is not None else ())
        for dim, factors in enumerate(dims)
        if rule is not None and {*factors} & {*rule.cuttable}
    }
    assert places == case.cut
    if rule is None or not case.cut:
        return
    model, settings = Calls(case), call.args[-1]
    values = [value.detach() for value in model.values]
    law = Case(name_of(case), call.target, (*values, settings))
    check_all(law, Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2))


@pytest.mark.parametrize("mesh", [ap.Mesh(dp=2, tp=2), ap.Mesh(pp=2, dp=2)])
def test_models_with_them_are_those_of_one_device(mesh: ap.Mesh) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(16, 8))
            self.down = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + Linear.apply(Swish.apply(Linear.apply(x, self.up)), self.down)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x).square().mean()

    torch.manual_seed(0)
    about = {"microbatches": 2} if "pp" in mesh else {}
    assert ap.verify(Net(), (torch.randn(8, 8),), mesh=mesh, **about).ok


def test_megatron_comes_out_of_functions() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(16, 8))
            self.down = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return Linear.apply(Swish.apply(Linear.apply(x, self.up)), self.down).square().sum()

    model = Two()
    ap.shard(model, params={"up": ("tp", None)})
    about = {"mesh": ap.Mesh(tp=2), "mode": "propagate"}
    plan = ap.plan(model, (torch.randn(8, 8),), **about)
    assert str(plan.layouts["down"]) == "[_, @tp]"
    assert plan.fallbacks == ()
    assert [one.forward for one in plan.movements()] == ["all_reduce"]


def test_a_rule_of_the_user_goes_first() -> None:
    from autopar.strategies import register_rule

    class Own(Swish):
        pass

    case = FunctionCase(Own, ((6, 4),), frozenset())
    register_rule(Own, "n! d -> n! d")
    _, call = call_of(case)
    rule = rule_of(call)
    assert rule is not None
    assert rule.text == "n! d -> n! d"
