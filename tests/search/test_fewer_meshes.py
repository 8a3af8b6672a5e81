"""Of large programs some meshes, and some sizes, are left out by a guess, which costs little."""

from __future__ import annotations

from typing import Any

import pytest

import autopar as ap
from autopar.search import layout_search
from tests import models

CASES = {
    "gpt": lambda: models.gpt(layers=2, batch=16),
    "llama": lambda: models.llama(layers=2, batch=16),
    "long": lambda: models.llama(layers=1, batch=2, sequence=64),
    "resnet": lambda: models.resnet(width=16, size=16),
}
COSTS = 0.01  # relative


@pytest.mark.parametrize(
    ("name", "part"), [("gpt", None), ("llama", 0.7), ("long", None), ("resnet", None)]
)
def test_with_fewer_meshes_a_step_is_about_as_fast(
    name: str, part: float | None, monkeypatch
) -> None:
    case, cluster = CASES[name](), ap.Cluster.preset("dgx-h100", 2)
    asked = {"cluster": cluster, "pipeline": None, "microbatches": 1, "recompute": None}
    if part is not None:
        free = ap.plan(case.model, case.args, case.kwargs, **asked)
        asked["memory"] = part * free.memory.peak
    every = ap.plan(case.model, case.args, case.kwargs, **asked)
    monkeypatch.setattr(layout_search, "LARGE_PROGRAM", 0)
    fewer = ap.plan(case.model, case.args, case.kwargs, **asked)
    assert fewer.cost.seconds <= every.cost.seconds * (1 + COSTS)
    assert every.search is not None
    assert fewer.search is not None
    tried = [sum(not one.why for one in plan.search.considered) for plan in (fewer, every)]
    assert tried[0] <= tried[1]


@pytest.mark.parametrize(("name", "part"), [("gpt", 0.6), ("resnet", 0.5)])
def test_with_fewer_sizes_a_step_is_about_as_fast(name: str, part: float, monkeypatch) -> None:
    case, cluster = CASES[name](), ap.Cluster.preset("piz-daint", 4)
    asked: dict[str, Any] = {"cluster": cluster}
    free = ap.plan(case.model, case.args, case.kwargs, **asked)
    asked["memory"] = part * free.memory.peak
    every = ap.plan(case.model, case.args, case.kwargs, **asked)
    monkeypatch.setattr(layout_search, "LARGE_PROGRAM", 0)
    fewer = ap.plan(case.model, case.args, case.kwargs, **asked)
    assert fewer.cost.seconds <= every.cost.seconds * (1 + COSTS)
