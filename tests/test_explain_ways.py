"""Why a step is run as it is: of what was weighed, the best with each other decision."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput
from autopar.plans.step_reasons import VALUE_OF, WayExplanation, WeighedValue
from autopar.text.tables import WIDTH
from autopar.text.units import seconds_text
from tests import models
from tests.report import plans


@pytest.mark.parametrize("name", VALUE_OF)
def test_each_answer_has_the_best_way_of_each_other_decision(name) -> None:
    plan = plans.chosen()
    why = plan.explain(name)
    assert isinstance(why, WayExplanation)
    way = plan.alternative(why.limit)
    assert (why.way, why.chosen) == (way, VALUE_OF[name](way))
    values = {VALUE_OF[name](one) for one in plan.alternatives} - {why.chosen}
    told = {one.value for one in why.others}
    assert told >= values
    for one in why.others:
        if one.value not in values:  # the next mesh of the search for layouts
            assert name == "mesh"
            continue
        ways = [w for w in plan.alternatives if VALUE_OF[name](w) == one.value]
        assert one.count == len(ways)
        fitting = [w for w in ways if w.fits] or ways
        assert one.best.seconds == min(w.seconds for w in fitting)
    # No other that fits is faster by more than a simpler plan may take.
    assert all(way.seconds <= 1.01 * o.best.seconds for o in why.others if o.best.fits)
    text, data = str(why), json.loads(json.dumps(why.to_json()))
    assert text.startswith(f"{name}: {why.chosen}\n")
    assert [one["value"] for one in data["others"]] == [one.value for one in why.others]
    assert not re.search(r"\b(pipes|scale|latency|forward)=", text)


def test_the_next_mesh_is_priced_as_a_plan_for_it_is() -> None:
    case = models.gpt(layers=6, batch=16)
    fixed = {"cluster": plans.small(), "pipeline": None, "microbatches": 1, "states": "whole"}
    plan = ap.plan(case.model, case.args, case.kwargs, **fixed, seconds=None)
    why = plan.explain("mesh")
    assert plan.mesh in [one.mesh for one in plan.search.considered]
    searched = [one for one in plan.search.considered if one.mesh != plan.mesh and one.seconds]
    mesh = min(searched, key=lambda one: one.seconds).mesh
    told = next(one.best for one in why.others if one.value == str(mesh))
    made = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, **fixed)
    assert told.cost.parts == pytest.approx(made.cost.parts)
    assert told.memory == made.memory.peak
    assert "meshes by the search for layouts (* taken)" in str(why)


def test_pages_are_no_wider_than_a_page() -> None:
    for plan in (plans.chosen(), plans.pipelined(), plans.megatron()):
        names = [*VALUE_OF, "layers.0.up", "layers.0.up.weight"]
        for text in (str(plan), *(str(plan.explain(name)) for name in names)):
            assert max(map(len, text.splitlines())) <= WIDTH
            rows = text.splitlines()
            taken = [row for row in rows if row.startswith("  * ")]
            assert len(taken) == len({*taken})


def test_stages_are_explained_by_what_the_next_best_loses() -> None:
    why = plans.chosen().explain("stages")
    assert {why.chosen, *(one.value for one in why.others)} >= {"no pipeline", "2 ranks deep"}
    other = why.others[0].best
    text = str(why)
    assert f"takes {seconds_text(other.seconds - why.way.seconds)} more" in text
    parts = {k: other.cost.parts[k] - v for k, v in why.way.cost.parts.items()}
    most = max(parts, key=lambda name: parts[name])
    assert f": loses {most} {seconds_text(parts[most])}" in why.why
    assert f"\n    loses {most} {seconds_text(parts[most])}" in text
    assert "the fastest that fits" in text
    assert f": {seconds_text(why.way.seconds)} a step" in " ".join(text.split())
    assert "ruled out by bounds, unasked" in text


def test_what_does_not_fit_is_told_with_its_bytes() -> None:
    why = plans.chosen().explain("stages")
    large = replace(why.others[0].best, fits=False, seconds=why.way.seconds / 2, memory=9e12)
    told = replace(why, others=(WeighedValue("8 ranks deep", large, 1),))
    assert "nothing else that was built fits" in told.why
    assert "less (-50%)" in told.against(large)
    assert "holds 9 TB" in told.against(large)
    slower = replace(why.others[0].best, seconds=4 * why.way.seconds)
    others = [WeighedValue(f"{depth} ranks deep", slower, 1) for depth in (2, 3, 4)]
    lines = str(replace(why, others=(*others, told.others[0]))).splitlines()
    assert "(4 times)" in " ".join(lines[:4])
    place = next(at for at, line in enumerate(lines) if line.startswith("  8 ranks deep takes"))
    assert any("but holds 9 TB" in line for line in lines[place + 1 : place + 4])


def test_what_is_faster_and_was_not_taken_is_told_with_the_reason() -> None:
    why = plans.chosen().explain("stages")
    faster = replace(why.others[0].best, seconds=0.995 * why.way.seconds, fits=True)
    told = replace(why, others=(WeighedValue("2 ranks deep", faster, 1),))
    assert "less (-0.5%): what is more complex has to gain 1%" in told.why
    fastest = f"simpler than the fastest that fits, which takes {seconds_text(faster.seconds)}"
    assert fastest in " ".join(str(told).split())


def test_what_was_asked_for_says_so() -> None:
    assert "asked for" in plans.megatron().explain("schedule").why
    assert "asked for" in plans.pipelined().explain("stages").why
    assert plans.pipelined().explain("schedule").chosen == "chimera, 2 pipes"


class Staged(nn.Module):
    """A module has the name of a question."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def test_a_module_comes_before_a_question_of_its_name() -> None:
    plan = ap.plan(Staged(), (torch.randn(8, 16),), cluster=plans.small(), mesh=ap.Mesh(dp=4))
    module, whole = plan.explain("stages"), plan.explain("plan:stages")
    assert module.what == "linear"
    assert "plan:stages" in str(module)
    assert whole.chosen == "no pipeline"
    assert "plan:schedule" not in str(plan.explain("schedule"))
    with pytest.raises(InvalidInput, match="of the whole step: stages, schedule"):
        plan.explain("plan:stage")


def test_a_module_of_blocks_is_explained_with_equal_blocks_together() -> None:
    case = models.gpt(layers=6, batch=16)
    about = {"cluster": plans.small(), "mesh": ap.Mesh(dp=4), "mode": "data"}
    why = ap.plan(case.model, case.args, case.kwargs, **about).explain("layers")
    calls = [one for one in why.blocks if one.operator == "linear"]
    ups = [one for one in calls if one.module == "layers.{0..5}.up"]
    assert [(one.operator, one.count) for one in ups] == [("linear", 6)]
    assert sum(one.count for one in why.blocks) == len(why.others) + 1
    rows = [line.split() for line in str(why).splitlines()]
    assert ["layers.{0..5}.up", "linear", ups[0].strategy, "x", "6"] in rows
    assert not any(row[:1] == ["layers.3.up"] for row in rows)
