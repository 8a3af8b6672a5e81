"""Steps that papers published, as `benchmarks/published.py` predicts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import published
from benchmarks.published import PAPERS, Run
from benchmarks.published_models import Sizes

SMALL = Run(
    paper="none",
    name="small",
    sizes=Sizes(hidden=1024, heads=16, layers=4, sequence=512, vocabulary=4096),
    gpus=8,
    tp=4,
    batch=8,
    microbatch=2,
)


def test_a_published_step_is_predicted_and_fits() -> None:
    run = next(one for one in PAPERS["megatron"]() if one.name == "1.7B")
    line = published.report(run)
    assert line["ratio"] == pytest.approx(1, abs=0.05)
    assert line["fits"]
    assert sum(line["parts"].values()) == pytest.approx(line["seconds"], rel=1e-2)


def test_twice_the_micro_batch_takes_more_memory() -> None:
    one, twice = published.report(SMALL), published.larger(SMALL)
    assert twice["microbatch"] == 4
    assert twice["gigabytes"] > one["gigabytes"]["peak"]


def test_what_does_not_fit_is_found() -> None:
    lines = [{"model": "a", "fits": True, "published_fits": False, "seconds": 1, "ratio": 0.9}]
    found = published.summary(lines)
    assert (found["median_error"], found["wrong_about_memory"]) == (0.1, ["a"])


def test_the_best_is_no_slower_than_the_paper_s_way_and_says_why(monkeypatch) -> None:
    """Whatever the planner chose: here copies of a small model that runs nothing again, or a way
    that is slower than the paper's."""
    ways = {
        "planner": replace(SMALL, tp=1, microbatch=1, recompute="none"),
        "paper": replace(SMALL, microbatch=1),
    }
    lines = {}
    for best, way in ways.items():
        monkeypatch.setattr(published, "choice", lambda *about, way=way: (way.plan(), 0.0))
        lines[best] = published.comparison(SMALL)
        assert lines[best]["best"] == best
        seconds = lines[best]["seconds"]
        assert seconds[best] == min(seconds.values())
        assert all(lines[best]["fits"].values())
    why = lines["planner"]["why"]
    assert "loses recomputation " in why[0]
    assert ", inside nodes " in why[0].partition(";")[0]
    assert any(said.startswith("mesh: Mesh(dp=8, tp=1), not Mesh(dp=2, tp=4)") for said in why)
    assert any(said.startswith("recompute: nothing, not 4 in full") for said in why)
    assert [said.partition(":")[0] for said in lines["paper"]["why"][1:]] == ["microbatches"]
    found = published.summary_of_choices([*lines.values()])
    assert (found["rows"], found["slower_than_papers"]) == (2, ["small"])
