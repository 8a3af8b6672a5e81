"""No plan takes less than the bound of its search, whatever runs again and wherever states are."""

from __future__ import annotations

import pytest

import autopar as ap
from tests import models
from tests.mixtures import mixture

CASES = {
    "gpt": lambda: models.gpt(layers=3, hidden=16, heads=2),
    "linears": lambda: models.mlp(layers=4),
    "resnet": models.resnet,
    "mixture": lambda: mixture(blocks=2),  # with operators of several results
}
WAYS = [("none", None), ("selective", "whole"), ("full", "whole"), ("full", "zero1")]


@pytest.mark.parametrize("name", CASES)
def test_no_plan_takes_less_than_its_bound(name: str) -> None:
    case = CASES[name]()
    for kind, states in WAYS:
        options = {"pipeline": None, "recompute": None if kind == "none" else kind}
        options |= {"states": states} if states else {}
        plan = ap.plan(case.model, case.args, case.kwargs, cluster=ap.Cluster.local(4), **options)
        assert plan.search is not None
        assert plan.search.bound <= plan.seconds * (1 + 1e-9)
        assert plan.search.objective == pytest.approx(plan.seconds)
        if kind == "full":  # what runs again is searched for as it is priced
            assert plan.search.bound >= plan.seconds * 0.95
