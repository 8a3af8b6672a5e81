"""No way that is asked for by name is faster than what the automatic choice finds.

At length, for more models on more machines: `benchmarks/exhaustive.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import autopar as ap
from tests.captures import shared_captures
from tests.enumerated import Way, every_way, shared_searches
from tests.models import Case, gpt, mlp
from tests.test_mixed_machines import FAST, SLOW, cluster
from tests.toy import EVEN, machines


def ways(case: Case, given: ap.Cluster, memory: float | None = None, **asked: Any) -> list[Way]:
    """Those that fit."""
    with shared_searches():
        return [way for way in every_way(case, given, memory, **asked) if way is not None]


def plan(case: Case, given: ap.Cluster, **options: Any) -> ap.Plan:
    return ap.plan(case.model, case.args, case.kwargs, cluster=given, **options)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: mlp(layers=3, batch=8), machines(8, *EVEN)),
        (lambda: mlp(layers=3, batch=4), cluster((FAST, 2), (SLOW, 2))),
        (lambda: gpt(layers=1, batch=8), machines(4, *EVEN)),
    ],
    ids=["mlp on 8", "mlp on mixed machines", "gpt"],
)
def test_no_way_by_name_is_faster(make: Callable[[], Case], given: ap.Cluster) -> None:
    case = make()
    with shared_captures():
        chosen, every = plan(case, given), ways(case, given)
    best = min(every, key=lambda way: way.seconds)
    assert len(every) > 10
    fastest = chosen.alternatives[0]
    assert fastest.fits
    assert fastest.seconds <= best.seconds * (1 + 1e-6), best
    # A simpler plan may take a bit more.
    assert chosen.cost.seconds <= fastest.seconds * (1.01 + 1e-9)


def test_states_on_the_host_have_layouts_of_their_own() -> None:
    """And layouts fit when their program does, which needs more than the search adds up."""
    case, given = mlp(layers=4, batch=16), machines(8, *EVEN)
    asked = {"memory": 13708.8, "pipeline": None}
    with shared_captures():
        chosen = plan(case, given, **asked)
        named = {"mesh": ap.Mesh(x=8), "microbatches": 1, "recompute": None}
        best = plan(case, given, **{**asked, **named}, states=chosen.states)
    assert chosen.states.optimizer_device == "host"
    assert chosen.cost.seconds == pytest.approx(best.cost.seconds, rel=1e-6)
