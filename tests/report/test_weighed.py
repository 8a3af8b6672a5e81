"""Weighed plans say where their seconds and bytes go, in the plan, its file, text and page."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

import autopar as ap
from autopar.candidates.alternative import Alternative
from autopar.cost.time_report import Cost
from autopar.plans.plan import Plan
from autopar.text.units import bytes_text, seconds_text
from tests import models
from tests.report import plans


def short_of_memory() -> Plan:
    """Among pipelines of which some regions run again."""
    case = models.gpt(layers=6, batch=16)
    about = {"mesh": ap.Mesh(pp=2, dp=2), "memory": 3e6, "microbatches": 4}
    return ap.plan(case.model, case.args, case.kwargs, cluster=plans.small(), **about)


@pytest.mark.parametrize("make", [plans.chosen, plans.pipelined, plans.megatron, short_of_memory])
def test_the_parts_of_a_way_are_its_seconds_and_its_bytes(make) -> None:
    plan = make()
    limit = plan.limit or math.inf
    for one in (plan.alternative(limit), *plan.alternatives):
        assert sum(one.cost.parts.values()) == pytest.approx(one.seconds)
        assert min(one.cost.parts.values()) >= -1e-12 * one.seconds
        assert one.held.peak == one.memory
        assert sum(one.held.parts.values()) == one.memory
        kinds = asdict(one.held)
        del kinds["at_peak"]
        assert max(kinds.values()) <= one.memory


def test_what_goes_between_nodes_is_what_lies_on_axes_between_them() -> None:
    case = plans.tensor_parallel(models.gpt(layers=6, batch=16))

    def cost(nodes: int, devices: int) -> Cost:
        about = {"cluster": plans.small(nodes, devices), "mode": "propagate"}
        return ap.plan(case.model, case.args, case.kwargs, mesh=ap.Mesh(tp=2), **about).cost

    inside, between = cost(1, 2), cost(2, 1)
    assert inside.parts["between nodes"] == 0.0 < inside.parts["inside nodes"]
    assert between.parts["inside nodes"] == 0.0 < between.parts["between nodes"]
    assert inside.parts["compute"] == between.parts["compute"]


def test_what_runs_again_is_a_part_of_its_own() -> None:
    case = models.gpt(layers=6, batch=16)
    about = {"mesh": ap.Mesh(dp=2), "cluster": plans.small(), "mode": "data"}
    plain, again = (
        ap.plan(case.model, case.args, case.kwargs, recompute=kind, **about).cost.parts
        for kind in (None, "full")
    )
    assert plain["recomputation"] == 0.0 < again["recomputation"]
    assert again["compute"] == pytest.approx(plain["compute"])


def test_what_was_weighed_and_ruled_out_is_saved_printed_and_drawn(tmp_path: Path) -> None:
    plan = plans.chosen()
    way = plan.alternative(plan.limit or math.inf)
    assert sum(plan.left_out.values()) > 0
    plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert saved.left_out == plan.left_out
    figures = [(one.cost, one.held) for one in plan.alternatives]
    assert [(one.cost, one.held) for one in saved.alternatives] == figures
    plan.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    for text in (str(plan), str(saved)):
        assert "ruled out by bounds, unasked:" in text
        lines = text[text.index("ways to run a step (* taken)") :].splitlines()
        rows = list(pairwise(lines))
        for one in plan.alternatives[:4]:
            figures = f"      {seconds_text(one.seconds)}"
            mark = "  * " if one == way else "    "
            row = next(
                row for row in rows if row[0] == mark + one.how and row[1].startswith(figures)
            )
            assert all(seconds_text(part) in row[1] for part in one.cost.parts.values() if part)
        assert sum(line.startswith("  * ") for line in lines) == 1
    for one in plan.alternatives:
        assert all(seconds_text(part) in page for part in one.cost.parts.values() if part)
        assert bytes_text(one.held.at_peak.activations) in page
    assert "Bounds ruled out, unasked:" in page


def test_schedules_are_named_in_words() -> None:
    def words(one: Alternative) -> str:
        return one.how.partition(": ")[2]

    found = {words(one) for one in plans.chosen().alternatives if one.schedule}
    assert found
    assert not any("=" in text for text in found)
