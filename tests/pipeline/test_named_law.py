"""What is asked for by name is a choice of one: no slower than what the choice told of it.

And no price is too good to be true: not below the work over all devices, not below the bound.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.candidates.alternative import Alternative
from autopar.cost.operator_costs import ShardSizes, facts_of, operator_work
from autopar.strategies import Strategy, tensor_inputs
from tests.models import Case, gpt, mlp
from tests.pipeline.models import llama, share_captures  # noqa: F401
from tests.pipeline.test_choice import slow_network
from tests.toy import EVEN, SLOW, machines


class Layers(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def layers(bias: bool) -> Case:
    with torch.device("meta"):
        return Case("layers", Layers(bias), (torch.empty(16384, 1024),))


KINDS = ("full", "selective", None)
A100 = ap.Cluster.preset("dgx-a100")
CASES = {
    "layers": (lambda: layers(True), A100, {}),
    "layers without biases": (lambda: layers(False), A100, {}),
    "gpt": (gpt, slow_network(2), {}),
    "gpt on one node": (gpt, machines(4, *EVEN), {"microbatches": 4}),
    "llama": (lambda: llama(8, 2), slow_network(2), {"mesh": ap.Mesh(pp=2), "microbatches": 4}),
    "mlp": (lambda: mlp(layers=5), machines(4, *SLOW), {}),
    "mlp, the axis last": (lambda: mlp(layers=5), machines(4, *EVEN), {"mesh": ap.Mesh(b=2, pp=2)}),
}


@cache
def chosen(name: str) -> tuple[Case, ap.Plan]:
    make, cluster, options = CASES[name]
    case = make()
    return case, ap.plan(case.model, case.args, case.kwargs, cluster=cluster, **options)


def named(case: Case, cluster: ap.Cluster, one: Alternative) -> ap.Plan:
    """The plan that is asked for in the words of an alternative."""
    every = [ap.Recompute(k, p) for k in KINDS for p in ("device", "cut", "host")]
    kind = next((how for how in every if one.recompute.endswith(how.words)), None)
    words = {"mesh": one.mesh, "microbatches": one.microbatches, "pipeline": None}
    words |= {"recompute": kind, "states": one.states}
    if one.schedule:
        schedule = {"name": one.schedule, **dict(one.options)}
        words |= {"schedule": schedule, "pipeline": "auto"}
    return ap.plan(case.model, case.args, case.kwargs, cluster=cluster, **words)


def least_seconds(plan: ap.Plan) -> float:
    """The arithmetic of a step, shared by all devices at their peak."""
    device, seconds = plan.cluster.device, 0.0
    for node in plan.captured.graph.nodes:
        rule = plan.captured.rules[node.name] if node.op == "call_function" else None
        if rule is not None:
            facts = facts_of(node, rule, tensor_inputs(node))
            uncut = operator_work(facts, ShardSizes(rule, [Strategy()], plan.mesh))
            seconds += float((uncut.flops + uncut.backward_flops)[0]) / device.peak(facts.dtype)
    return seconds * plan.microbatches / plan.cluster.devices


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_by_name_is_no_slower_than_the_choice_told(name: str) -> None:
    """The choice gives up on layouts that cannot be the best."""
    case, plan = chosen(name)
    fitting = [one for one in plan.alternatives if one.fits]
    taken = next(
        one
        for one in fitting
        if (one.mesh, one.seconds) == (plan.whole_mesh, pytest.approx(plan.cost.seconds))
    )
    step = max(len(fitting) // 5, 1)
    for one in (taken, *fitting[::step]):
        again = named(case, plan.cluster, one)
        assert again.cost.seconds <= one.seconds * (1 + 1e-9), str(one)
        assert again.search.bound <= again.cost.seconds * (1 + 1e-9)
        assert least_seconds(again) <= again.cost.seconds * (1 + 1e-9)
        if one is taken:
            assert again.whole_mesh == plan.whole_mesh
            assert again.cost.seconds == pytest.approx(plan.cost.seconds)
            assert again.memory.peak == pytest.approx(plan.memory.peak)
            assert again.decisions == plan.decisions
            assert again.pipelining == plan.pipelining
    fastest = fitting[0].seconds
    assert fastest <= plan.cost.seconds * (1 + 1e-9)
    assert plan.cost.seconds <= 1.01 * fastest
    assert all(least_seconds(plan) <= one.seconds * (1 + 1e-9) for one in plan.alternatives)


@pytest.mark.parametrize("name", ["gpt", "layers", "mlp, the axis last"])
def test_a_plan_from_its_file_has_its_price(name: str, tmp_path) -> None:
    case, plan = chosen(name)
    shown = [one for one in plan.alternatives if one.fits and one.schedule][:2]
    for one in [named(case, plan.cluster, alternative) for alternative in shown]:
        one.save(tmp_path / "plan.json")
        loaded = ap.Plan.load(tmp_path / "plan.json").attach(case.model, case.args, case.kwargs)
        assert loaded.cost == one.cost
        assert loaded.pipelining == one.pipelining


def test_the_whole_machine_is_no_faster_with_biases() -> None:
    """Fusing a bias loses no work: 8 products forward and 15 backward on all devices."""
    (_, with_biases), (_, without) = chosen("layers"), chosen("layers without biases")
    assert with_biases.cost.seconds >= without.cost.seconds
    flops = 2 * 16384 * 1024**2 * (8 + 15)
    least = flops / (8 * A100.device.peak(torch.float32))
    assert least <= without.cost.seconds <= 1.2 * least
