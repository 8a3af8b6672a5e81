"""The benchmark of automatic choices, held together on a small case."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import autopar as ap
from benchmarks import choices
from benchmarks.choice_cases import CASES
from benchmarks.choice_templates import Template, ways
from tests.models import mlp

SMALL = replace(
    CASES["12-layer-gpt-on-8-h100"],
    make=lambda batch: mlp(layers=2, batch=batch),
    batch=16,
    ways=lambda batch: ways(batch, ["dp8", "pp2 dp4", "dp16"], ["whole none", "zero1 none"]),
)


@pytest.mark.parametrize("name", CASES)
def test_every_template_of_a_case_can_be_asked_for(name: str) -> None:
    case = CASES[name]
    templates, devices = case.templates, case.machines().devices
    assert len(templates) >= 25
    assert len({template.name for template in templates}) == len(templates)
    for template in templates:
        options = template.options()
        assert options["mesh"].size == devices or "mixed" in case.machines().name
        assert case.batch % template.microbatches == 0
        assert ("pp" in options["mesh"]) == ("schedule" in options)


def test_a_template_is_what_its_name_says() -> None:
    [template] = ways(64, ["pp2 dp2 tp2"], ["zero3 full 512MiB"], ["interleaved-3"], rows=[4])
    assert template.name == "pp2 dp2 tp2, 8 micro-batches, zero3 full 512MiB, interleaved-3"
    assert template.options() == {
        "mesh": ap.Mesh(pp=2, dp=2, tp=2),
        "microbatches": 8,
        "states": ap.States("all", "all", "all", buffer_bytes=512 * 2**20),
        "recompute": "full",
        "schedule": "interleaved",
        "schedule_options": {"chunks": 3},
    }
    partial_states = Template(axes="dp8", microbatches=1, saving="2:4:all none")
    assert partial_states.states == ap.States(2, 4, "all")


def test_templates_have_whole_numbers_of_micro_batches() -> None:
    templates = ways(24, ["dp8", "ep4"], ["whole none"], rows=[1, 2])
    found = {(template.axes, template.microbatches) for template in templates}
    assert found == {("dp8", 3), ("ep4", 6), ("ep4", 3)}


def test_a_case_is_measured_and_its_templates_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, SMALL.name, SMALL)
    monkeypatch.setattr(choices, "_in_own_process", choices._of_case)
    monkeypatch.setattr(choices, "warm_up", lambda: None)
    monkeypatch.setattr(choices, "choose", cache(choices.choose))  # the longer choice is no other
    keep = tmp_path / "templates.jsonl"
    seconds = choices.LONG_SECONDS
    asked = Namespace(keep=keep, seconds=seconds, long=True, auto_only=False, templates_only=False)
    line = choices.measure(SMALL, asked)
    assert line is not None
    kept = choices.read_lines(keep)
    assert [one["template"] for one in kept] == [one.name for one in SMALL.templates]
    refused = [one["template"] for one in kept if "refused" in one]
    assert [name.partition(",")[0] for name in refused] == ["dp16", "dp16"]
    assert (line["planned"], line["templates_refused"], line["not_measured"]) == (4, 2, 0)
    best = min(one["seconds"] for one in kept if "seconds" in one)
    assert line["ratio"] == pytest.approx(line["seconds"] / best)
    assert (line["long_choice"], line["long_ratio"]) == (line["choice"], 1.0)

    monkeypatch.setattr(choices, "plan_templates", None)  # nothing is planned by name again
    assert choices.measure(SMALL, Namespace(**{**vars(asked), "templates_only": True})) is None
    assert SMALL.words in choices.table([line]).splitlines()[2]


def test_the_summary_names_cases_that_miss_the_aim() -> None:
    line = {"choice_cpu_seconds": 10.9, "limit": 10.0, "peak_gigabytes": 1.0}
    lines = [
        {**line, "case": "fast", "ratio": 0.98},
        {**line, "case": "slow", "ratio": 1.02, "long_ratio": 1.03},
        {**line, "case": "late", "refused": "nothing fits", "choice_cpu_seconds": 11.1},
    ]
    figures = choices.summary(lines)
    assert figures["slower_than_template"] == ["slow"]
    assert figures["without_ratio"] == figures["late"] == ["late"]
    assert (figures["median_ratio"], figures["largest_long_ratio"]) == (1.0, 1.03)


def test_refusals_are_told_with_their_reason() -> None:
    chosen = {"limit": 10.0, "refused": "nothing fits"}
    templates = {"a": {"seconds": 2.0}, "b": {"seconds": 1.5}, "c": {"refused": "too large"}}
    line = choices.compare(SMALL, templates, chosen)
    assert (line["template"], line["refused"]) == ("b", "nothing fits")
    assert "ratio" not in line
    assert json.loads(json.dumps(line)) == line
