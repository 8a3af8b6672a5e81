"""Lower bounds: no way to run a step takes less, and none is said not to fit that does."""

from __future__ import annotations

import math

import pytest

import autopar as ap
from autopar.candidates.recomputation import Regions
from autopar.capture import capture
from autopar.options import PlanOptions, read_request
from autopar.pipeline.schedules import schedule
from autopar.planner.bounds import Bounds, most_held
from autopar.planner.loop import Planner
from autopar.planner.question import MIXED, Found, Question
from autopar.planner.record import Record
from autopar.planner.rules import SearchEntry
from autopar.recompute import FULL
from tests import large_models
from tests.models import gpt
from tests.toy import EVEN, machines


def test_a_stage_in_turn_holds_what_its_depth_asks_for() -> None:
    """Of 1F1B the first of p ranks holds p micro-batches, the last holds one: however stages share
    what they keep, some rank holds one part of 1 + 1/2 + ... + 1/p."""
    for stages in (2, 4, 8):
        made = schedule("1f1b", stages=stages, microbatches=2 * stages)
        least = 1 / sum(1 / depth for depth in range(1, stages + 1))
        assert most_held(made, False, 0.0) == pytest.approx(least, rel=1e-5)
    deep = schedule("gpipe", stages=4, microbatches=8)
    assert most_held(deep, False, 0.0) == pytest.approx(8 / 4, rel=1e-5)
    assert most_held(deep, False, 4.0) == pytest.approx(8 / 4 + 4 / 4, rel=1e-5)


@pytest.mark.parametrize(("share", "least"), [(0.4, 1), (0.5, 3), (0.8, 3)])
def test_no_way_takes_less_than_its_bound(share: float, least: int, monkeypatch) -> None:
    """Every way that fits was said to have room, and to take no less than it was said to."""
    case, cluster = gpt(layers=2, batch=4), machines(2, *EVEN)
    memory = share * ap.plan(case.model, case.args, case.kwargs, cluster=cluster).memory.peak
    checked = []
    learn = Planner._learn

    def learned(self: Planner, asked: SearchEntry) -> None:
        if isinstance(asked.answer, Found):
            bound = self._bound(asked.question, asked.answer.seconds)
            assert bound <= asked.answer.seconds * (1 + 1e-6), str(asked)
            checked.append(bound)
        learn(self, asked)

    monkeypatch.setattr(Planner, "_learn", learned)
    monkeypatch.setattr(Record, "cutoff", lambda *_: math.inf)  # all ways are weighed
    ap.plan(case.model, case.args, case.kwargs, cluster=cluster, memory=memory)
    assert len(checked) >= least


def test_a_call_with_several_results_runs_again_once() -> None:
    """As that which chooses experts."""
    case = large_models.mixtral(batch=8, sequence=64, layers=2)
    captured = capture(case.model, case.args, case.kwargs)
    request = read_request(PlanOptions(cluster=machines(4, *EVEN), memory=1e6))
    bounds = Bounds(captured, request, Regions(captured, request.recompute, []))
    question = Question(captured, (ap.Mesh(x=4),), recompute=MIXED)
    assert 0 < bounds.least_again(question) <= bounds.again(4, FULL) < bounds.again(2, FULL)
