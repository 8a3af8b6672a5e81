"""Law: what gets no gradient in a step costs no backward there, and a call still gives it one.

What a plan says is what it says of the same model with that part under `torch.no_grad`.
"""

from __future__ import annotations

import pytest

import autopar as ap
from autopar.cost.footprint import held_bytes
from autopar.strategies.node_info import info
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.pipeline.models import share_captures  # noqa: F401
from tests.toy import EVEN, machines
from tests.unlearned import assert_called_alike, pair

# Not what is hidden by what: the other program reads its parameters by way of detach.
ALIKE = ("compute", "communication", "forward", "backward", "gradient_sync", "gathered")
AUTO = {"mode": "auto"}
WAYS: list[tuple[str, dict]] = [
    ("head", {"mesh": ap.Mesh(dp=2), "states": "whole"}),
    ("head", {"mesh": ap.Mesh(dp=2), "states": "zero3"}),
    ("head", {"mesh": ap.Mesh(dp=2), "states": "zero3", "microbatches": 2}),
    ("head", {"mesh": ap.Mesh(a=2, b=2), "states": "zero1", **AUTO}),
    ("detached", {"mesh": ap.Mesh(dp=2), "states": "zero1"}),
    ("detached", {"mesh": ap.Mesh(dp=2), "states": "zero3"}),
    ("detached", {"mesh": ap.Mesh(pp=2, dp=2), "states": "zero1", "microbatches": 2}),
    ("detached", {"mesh": ap.Mesh(a=2), "states": "whole", **AUTO}),
]


@pytest.mark.parametrize(("name", "way"), WAYS, ids=str)
def test_a_step_is_planned_for_what_learns_alone(name: str, way: dict) -> None:
    way = {"mode": "data", "cluster": machines(way["mesh"].size, *EVEN), **way}
    case, like = pair(name)
    plan = ap.plan(case.model, case.args, **way)
    for node in plan.program.graph.nodes:
        assert info(node).learns or plan.prices.own(node).backward == 0
    for node in plan.program.placeholders.values():
        assert info(node).learns or not any(held_bytes(node, plan.mesh)[1:3])
    if way["mode"] == "data":
        assert_planned_alike(plan, ap.plan(like.model, like.args, **way))
    else:
        assert plan.search is not None
        assert plan.search.added_up == pytest.approx(plan.cost.seconds, rel=1e-6)
    module = ap.parallelize(case.model, case.args, plan=plan, backend="virtual", check=True)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    if not module.program.stages:
        assert_called_alike(module, case)


def assert_planned_alike(plan: ap.Plan, like: ap.Plan) -> None:
    found, expected = (one.cost.to_json() for one in (plan, like))
    assert all(found[part] == pytest.approx(expected[part]) for part in ALIKE)
    first, second = (one.memory.to_json() for one in (plan, like))
    assert first.pop("at_peak") == pytest.approx(second.pop("at_peak"), rel=1e-9)
    assert first == pytest.approx(second, rel=1e-9)
    moved = [
        [(r.forward, r.backward, r.bytes) for r in one.movements() if r.forward != "identity"]
        for one in (plan, like)
    ]
    assert moved[0] == moved[1]
