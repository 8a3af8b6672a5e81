"""The automatic plan is never predicted slower than what a person would pin by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

import autopar as ap
from autopar.mesh import Mesh
from autopar.search.auto import Search
from tests.annotations import megatron, sequence, stored, vocabulary
from tests.models import ZOO, Case
from tests.toy import EVEN, FAST, SLOW, machines

MESH = Mesh(dp=2, tp=2)
WAYS: dict[str, Callable[[Case], Case]] = {
    "data parallel": lambda case: case,
    "Megatron": lambda case: megatron(case, "tp"),
    "Megatron with the vocabulary": lambda case: vocabulary(megatron(case, "tp"), "tp"),
    "Megatron with the sequence": lambda case: sequence(megatron(case, "tp"), "tp", "dp"),
    "ZeRO-3": lambda case: stored(case, ("dp", "tp")),
}
CASES = [
    (name, way)
    for name in ("mlp", "gpt", "llama")
    for way in WAYS
    if name != "mlp" or "vocabulary" not in way
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_pinned_plans_are_not_predicted_faster(name: str, way: str) -> None:
    if name == "mlp" and "sequence" in way:
        pytest.skip("no sequence")
    pinned = WAYS[way](ZOO[name]())
    for links in (FAST, SLOW):
        cluster = machines(4, *links)
        by_hand = ap.plan(
            pinned.model, pinned.args, pinned.kwargs, mode="propagate", mesh=MESH, cluster=cluster
        )
        search = automatic(name, links)
        slack = search.objective - search.bound
        assert search.objective <= by_hand.cost.seconds + slack + 1e-12


@cache
def automatic(name: str, links: tuple[float, float]) -> Search:
    case = ZOO[name]()
    plan = ap.plan(
        case.model, case.args, case.kwargs, mode="auto", mesh=MESH, cluster=machines(4, *links)
    )
    assert plan.search is not None
    assert plan.search.objective == pytest.approx(plan.cost.seconds, rel=1e-6)
    return plan.search


def test_annotations_are_kept_and_never_make_a_plan_faster() -> None:
    case, pinned = ZOO["gpt"](), megatron(ZOO["gpt"](), "tp")
    options = {"mesh": MESH, "cluster": machines(4, *EVEN), "mode": "auto"}
    free = ap.plan(case.model, case.args, case.kwargs, **options)
    bound = ap.plan(pinned.model, pinned.args, pinned.kwargs, **options)
    assert bound.layouts["layers.0.up.weight"].dims == (("tp",), ())
    assert bound.layouts["layers.0.down.weight"].dims == ((), ("tp",))
    assert free.search is not None
    assert bound.cost.seconds >= free.search.bound
