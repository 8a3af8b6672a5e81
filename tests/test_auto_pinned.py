"""The automatic plan is never predicted slower than what a person would pin by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

import autopar as ap
from autopar.cluster import Link
from autopar.mesh import Mesh
from autopar.search.search_report import SearchReport
from tests.annotations import megatron, sequence, stored, vocabulary
from tests.models import ZOO, Case
from tests.pipeline.models import share_captures  # noqa: F401
from tests.toy import EVEN, FAST, SLOW, machines

MESH = Mesh(dp=2, tp=2)
(_NODE,) = machines(2, *EVEN).nodes
CLUSTERS = {
    "one node, fast": machines(4, *FAST),
    "one node, slow": machines(4, *SLOW),
    "two nodes": ap.Cluster((_NODE, _NODE), Link(1e-6, 2e8), "two nodes"),
}
MODELS: dict[str, Callable[[], Case]] = {
    **ZOO,
    **{name: partial(ZOO[name], layers=1) for name in ("gpt2", "llama", "bert", "vit")},
}
WAYS: dict[str, Callable[[Case], Case]] = {
    "data parallel": lambda case: case,
    "Megatron": lambda case: megatron(case, "tp"),
    "Megatron with the vocabulary": lambda case: vocabulary(megatron(case, "tp"), "tp"),
    "Megatron with the sequence": lambda case: sequence(megatron(case, "tp"), "tp", "dp"),
    "ZeRO-3": lambda case: stored(case, ("dp", "tp"), least=4),
}
WITHOUT_WORDS = ("mlp", "resnet")  # no vocabulary, no sequence
CASES = [
    (name, way)
    for name in MODELS
    for way in WAYS
    if name not in WITHOUT_WORDS or " with the " not in way
][::2]  # models take turns over the ways


@pytest.mark.parametrize(("name", "way"), CASES)
def test_pinned_plans_are_not_predicted_faster(name: str, way: str) -> None:
    case = WAYS[way](MODELS[name]())
    for where, cluster in CLUSTERS.items():
        options = {"mode": "propagate", "mesh": MESH, "cluster": cluster}
        by_hand = ap.plan(case.model, case.args, case.kwargs, **options)
        assert automatic(name, where).objective <= by_hand.cost.seconds * (1 + 1e-9)


@cache
def case_of(name: str) -> Case:
    return MODELS[name]()


@cache
def automatic(name: str, where: str) -> SearchReport:
    case = case_of(name)
    options = {"mode": "auto", "mesh": MESH, "cluster": CLUSTERS[where]}
    plan = ap.plan(case.model, case.args, case.kwargs, **options)
    assert plan.search is not None
    # States that were cut afterwards are not those that the search added up.
    said = plan.search.added_up if plan.states.is_whole else plan.search.objective
    assert said == pytest.approx(plan.cost.seconds, rel=1e-6)
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
