"""Law: what gets no gradient in a step costs no backward there, and a call still gives it one.

What a plan says is what it says of the same model with that part under `torch.no_grad`.
"""

from __future__ import annotations

import pytest

import autopar as ap
from autopar.cost.footprint import held_bytes
from autopar.strategies.node_info import info
from tests.parity import assert_equal, parallel_outcome, relative, single_outcome
from tests.toy import EVEN, machines
from tests.unlearned import NAMES, pair

# What is hidden by what differs: the other program reads its parameters by way of detach.
ALIKE = ("compute", "communication", "forward", "backward", "gradient_sync", "gathered")
WAYS: list[dict] = [
    {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "whole"},
    {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero1"},
    {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"},
    {"mesh": ap.Mesh(a=2), "mode": "auto", "states": "whole"},
    {"mesh": ap.Mesh(a=2, b=2), "mode": "auto", "states": "zero3"},
    {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3", "microbatches": 2},
    {"mesh": ap.Mesh(pp=2, dp=2), "mode": "data", "states": "zero1", "microbatches": 2},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_planned_for_what_learns_alone(name: str, way: dict) -> None:
    way = {**way, "cluster": machines(way["mesh"].size, *EVEN)}
    plan, like = (ap.plan(case.model, case.args, **way) for case in pair(name))
    for node in plan.program.graph.nodes:
        assert info(node).learns or plan.prices.own(node).backward == 0
    for each in plan.captured.parameters:
        node = plan.program.placeholders[each]
        assert info(node).learns or not any(held_bytes(node, plan.mesh)[1:3])
    if way["mode"] == "data":  # a search finds other layouts where the other program has detach
        found, expected = (one.cost.to_json() for one in (plan, like))
        assert all(found[part] == pytest.approx(expected[part]) for part in ALIKE)
        assert plan.memory.to_json() == pytest.approx(like.memory.to_json(), rel=1e-9)
        moved = [
            [(r.forward, r.backward, r.bytes) for r in one.movements() if r.forward != "identity"]
            for one in (plan, like)
        ]
        assert moved[0] == moved[1]
    if plan.search is not None:
        assert plan.search.objective == pytest.approx(plan.cost.seconds, rel=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_steps_and_calls_give_the_gradients_of_one_device(name: str, way: dict) -> None:
    case, _ = pair(name)
    module = ap.parallelize(case.model, case.args, backend="virtual", check=True, **way)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    if module.program.stages:
        return
    state = module.full_state_dict()
    for places in ((0,), (1,), (0, 1)):
        single = case.fresh()
        single.model.load_state_dict(state)
        module.zero_grad()
        for run in (single.run, lambda: module(*case.args)):
            outputs = run()
            sum(outputs[place].square().sum() for place in places).backward()
        expected = {n: p.grad for n, p in single.model.named_parameters() if p.grad is not None}
        found = module.full_grads()
        assert found.keys() == expected.keys()
        assert all(relative(found[n], expected[n], 1e-6) < 1e-9 for n in expected)
