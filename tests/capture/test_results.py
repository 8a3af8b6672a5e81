"""The rule law for single results of operators that give several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture.results import pick
from autopar.mesh import Mesh
from tests.capture.support import random
from tests.strategies.rule_law import Case, check_all

aten = torch.ops.aten
CALLS: dict[str, tuple[Any, ...]] = {
    "topk": (aten.topk.default, random(5, 4), 2),
    "topk along the first dim": (aten.topk.default, random(5, 4), 3, 0),
    "sort": (aten.sort.default, random(5, 4), 1, True),
    "cummax": (aten.cummax.default, random(5, 4), 0),
    "cummin": (aten.cummin.default, random(5, 4), 0),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_results_along_a_dim_are_cut_in_the_others(name: str, index: int) -> None:
    operator, *args = CALLS[name]
    rule = check_all(Case(name, pick, (operator, index, *args)), Mesh(a=2))
    assert len(rule.strategies(Mesh(a=2))) == 2


def test_a_stable_sort_names_its_dim() -> None:
    case = Case("sort", pick, (aten.sort.stable, 0, random(5, 4)), {"stable": True, "dim": 0})
    assert check_all(case, Mesh(a=2)).whole == {"d0"}
