"""Pictures show what there is: every action, all of a step's time, what is sent and held."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar as ap
from autopar.pipeline import schedule, simulate
from autopar.report.memory_charts import draw_memory as memory_drawn
from autopar.report.memory_charts import held_at_peak, rank_memories
from autopar.report.module_tree import module_tree
from autopar.report.program_lanes import program_blocks
from autopar.report.step_parts import step_parts
from autopar.report.traffic import link_traffic
from autopar.report.weighed_plans import draw_scatter, weighed_plans
from autopar.text.drawing import Axis, Drawing, style
from autopar.text.units import bytes_text, share_text
from tests import models
from tests.report import plans

MACHINES = ap.Cluster.preset("dgx-h100")
SVG = "{http://www.w3.org/2000/svg}"


def kinds(text: str) -> list[str]:
    return [box.get("class") or "" for box in ET.fromstring(text).iter(f"{SVG}rect")]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "chimera", "zb-v"])
def test_a_time_line_has_a_box_for_each_action(name: str, tmp_path: Path) -> None:
    made = schedule(name, stages=4, microbatches=8)
    simulate(made, forward=1, backward=2, sync_cost=1.0).save(tmp_path / "made.svg")
    shown = kinds((tmp_path / "made.svg").read_text())
    for kind in "FBIW":
        count = sum(action.kind == kind for _, action in made.actions)
        legend = len({action.pipe % 2 for _, action in made.actions if action.kind == kind})
        assert sum(one[0] == kind for one in shown if len(one) == 2) == count + legend


def test_a_long_time_line_is_a_few_shapes(tmp_path: Path) -> None:
    made = schedule("1f1b", stages=32, microbatches=256)
    simulate(made, forward=1, backward=2).save(tmp_path / "made.svg")
    text = (tmp_path / "made.svg").read_text()
    assert len(text) < 1e6
    drawn = re.findall(r'<path class="(\w)0" d="([^"]*)"', text)
    assert {kind: way.count("M") for kind, way in drawn} == {"F": 32 * 256, "B": 32 * 256}


@pytest.mark.parametrize("make", [plans.pipelined, plans.chosen, plans.megatron])
def test_the_parts_of_a_step_are_the_step(make: object) -> None:
    assert callable(make)
    plan = make()
    assert math.isclose(sum(one.size for one in step_parts(plan)), plan.cost.seconds, rel_tol=1e-9)


def test_megatron_sends_what_its_formulas_say() -> None:
    plan = plans.megatron()
    batch, sequence, hidden, layers, ranks = 8, 8, 32, 6, 4
    size = batch * sequence * hidden * 8
    sums = [one for one in link_traffic(plan) if one.what == "all_reduce"]
    assert {one.axes for one in sums} == {("tp",)}
    # Two sums of each layer forward and two backward, each (n - 1) / n of the activation, twice.
    assert sum(one.bytes for one in sums) == 4 * layers * 2 * (ranks - 1) / ranks * size


GPT = models.gpt(layers=4)
ASKED = {
    "whole": {"mesh": ap.Mesh(dp=4), "mode": "data"},
    "tensors": {"mesh": ap.Mesh(dp=2, tp=2), "microbatches": 2},
    "zero1": {"mesh": ap.Mesh(dp=4), "mode": "data", "states": "zero1", "microbatches": 2},
    "zero2": {"mesh": ap.Mesh(dp=4), "mode": "data", "states": "zero2", "microbatches": 2},
    "zero3": {"mesh": ap.Mesh(dp=4), "mode": "data", "states": "zero3", "microbatches": 2},
    "again": {"mesh": ap.Mesh(dp=2), "recompute": "full", "microbatches": 2},
    "half": {"mesh": ap.Mesh(dp=2), "precision": ap.Precision(compute=torch.bfloat16)},
    "chimera": {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "chimera", "microbatches": 4},
    "1f1b": {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4, "states": "zero1"},
    "zero3 1f1b": {
        "mesh": ap.Mesh(pp=2, dp=2),
        "schedule": "1f1b",
        "microbatches": 4,
        "states": "zero3",
    },
    "zb-v": {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "zb-v", "microbatches": 4},
}


@pytest.mark.parametrize("name", ASKED)
def test_the_top_of_a_picture_of_memory_is_the_peak_of_its_rank(name: str) -> None:
    plan = ap.plan(GPT.model, GPT.args, GPT.kwargs, cluster=MACHINES, **ASKED[name])
    peaks = [memory.peak for memory in plan.memories]
    found = rank_memories(plan)
    assert sorted(course.rank for course in found) == [*range(len(peaks))]
    assert peaks[found[0].rank] == max(peaks)
    for course in found:
        peak = peaks[course.rank]
        assert math.isclose(course.top, peak, rel_tol=1e-9)
        for places in (1, 50, 10**6):
            some = course.thinned(places)
            assert math.isclose(max(sum(held.values()) for *_, held in some), peak, rel_tol=1e-9)
        starts, ends = [one[0] for one in course.held], [one[1] for one in course.held]
        assert starts == sorted(starts)
        assert math.isclose(max(ends), plan.seconds, rel_tol=1e-9)
        assert all(size >= 0 for *_, held in course.held for size in held.values())
        assert f"at most {bytes_text(peak)}" in str(memory_drawn(course, 1e12))
    parts = held_at_peak(plan)
    assert math.isclose(sum(part.size for part in parts), plan.memory.peak, rel_tol=1e-9)
    picture = str(memory_drawn(found[0], 1e12))
    assert all(f'class="{part.kind}"' in picture for part in parts)


@pytest.mark.parametrize("learns", [True, False])
def test_the_parts_of_memory_are_the_peak_without_a_step(learns: bool) -> None:
    model = torch.nn.Linear(8, 8).requires_grad_(learns)
    plan = ap.plan(model, (torch.ones(4, 8),), mesh=ap.Mesh(dp=2), cluster=MACHINES)
    assert rank_memories(plan) == []
    parts = held_at_peak(plan)
    assert math.isclose(sum(part.size for part in parts), plan.memory.peak, rel_tol=1e-9)
    assert all(part.size > 0 for part in parts)
    assert ("gradients" in [part.name for part in parts]) == learns


def test_the_tree_has_all_time_and_all_parameters() -> None:
    plan = plans.chosen()
    root = module_tree(plan)
    calls = [node for node in plan.rewritten.nodes if node.op == "call_function"]
    assert math.isclose(root.seconds, sum(plan.prices.own(node).seconds for node in calls))
    layers = root.parts["layers"].parts
    assert [(part.name, part.count) for part in layers.values()] == [("{0..5}", 6)]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("3", "2", "1", "0"), ["3", "{2, 1, 0}"]),
        (("5", "1", "00", "7"), ["5", "{1, 00, 7}"]),
        (("1", "2", "3"), ["1", "{2..3}"]),
        (("9", "0", "1", "²"), ["9", "{0..1}", "²"]),
    ],
)
def test_blocks_of_any_names_have_all_the_time(
    names: tuple[str, ...], shown: list[str], tmp_path: Path
) -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in names})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.own.values():
                x = one(x)
            return x.sum()

    plan = ap.plan(Named(), (torch.ones(4, 8),), mesh=ap.Mesh(dp=2), cluster=MACHINES)
    root = module_tree(plan)
    assert [part.name for part in root.parts["own"].parts.values()] == shown  # the first is apart
    found = program_blocks(plan, root)
    assert math.isclose(sum(one.count * one.seconds for one in found), root.seconds)
    plan.report(tmp_path / "plan.html")


def test_names_may_have_any_characters(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    for name in ("a\x07b", "c\ud800d", "<&\"'>", "e\uffff"):
        model.add_module(name, torch.nn.Linear(8, 8))
    plan = ap.plan(model, (torch.ones(4, 8),), mesh=ap.Mesh(dp=2), cluster=MACHINES)
    plan.report(tmp_path / "plan.html")
    plan.draw(tmp_path / "plan.svg")
    words = [one.text for one in ET.parse(tmp_path / "plan.svg").iter(f"{SVG}text")]
    for shown in ("a\\x07b", "c\\ud800d", "<&\"'>", "e\\uffff"):
        assert shown in words
    assert "a\\x07b" in (tmp_path / "plan.html").read_text()


def test_blocks_are_in_the_order_of_the_program() -> None:
    plan = plans.megatron()
    shown = program_blocks(plan, module_tree(plan))
    assert [(one.name, one.count) for one in shown] == [("", 1), ("layers.{0..5}", 6), ("", 1)]
    order = {node.name: at for at, node in enumerate(plan.rewritten.nodes)}
    for block in shown:
        places = [order[row.call.name] for row in block.rows]
        assert places == sorted(places)
    inside = shown[1]
    assert inside.movements == sum(row.call.moved is not None for row in inside.rows) > 0


def test_each_way_says_why_it_was_not_taken() -> None:
    plan = plans.chosen()
    limit = plan.cluster.device.memory
    found = weighed_plans(plan.alternatives, plan.alternative(limit), limit)
    assert len(found) == len({*plan.alternatives, plan.alternative(limit)})
    assert [one.why for one in found].count("chosen") == 1
    words = ("slower", "takes", "as fast", "more complex")
    assert all(one.is_chosen or any(word in one.why for word in words) for one in found)
    assert str(draw_scatter(found, limit)).count("<circle") == len(found)


def test_figures_of_ways_are_plain() -> None:
    found = plans.chosen().alternatives[0]
    times = (0.995, 1.00001, 1.2, 2, 11)
    others = [replace(found, seconds=found.seconds * factor) for factor in times]
    first, *words = [one.why for one in weighed_plans(others, found, math.inf)]
    assert first == "0.5% faster, but more complex"
    assert words == ["chosen", "< 0.01% slower", "20% slower", "2.0x slower", "11.0x slower"]
    assert (share_text(-4e-7), share_text(0.0), share_text(12.5)) == ("> -0.01%", "0%", "1250%")


def test_ways_fill_the_picture_and_have_names() -> None:
    plan = plans.chosen()
    found = weighed_plans(plan.alternatives, plan.alternative(math.inf), math.inf)
    picture = str(draw_scatter(found, math.inf))
    across = [float(x) for x in re.findall(r'<circle [^>]*cx="([^"]*)"', picture)]
    assert max(across) - min(across) > 700
    chosen = next(one for one in found if one.is_chosen)
    assert f">{chosen.figures.how}</text>" in picture


def test_a_picture_of_its_own_has_paper_under_it() -> None:
    picture = Drawing(10, 10, "none")
    assert picture.file().index('<rect class="paper"') < picture.file().index("</svg>")
    assert "paper" not in str(picture)


def test_ticks_are_round_and_inside() -> None:
    for least, most in [(0.0, 1.0), (0.0, 3e-5), (0.0, 7.7e9), (1.0, 20.0), (0.0, 0.3)]:
        ticks = Axis(least, most, 0.0, 100.0).ticks()
        assert 3 <= len(ticks) <= 8
        assert all(least <= tick <= most * (1 + 1e-9) for tick in ticks)


def test_no_two_ticks_read_the_same() -> None:
    """Where round values differ by less than a text shows, there are fewer of them."""
    for text in ("{:.0f}".format, "{:.1f}".format, bytes_text):
        for least, most in [(0.0, 2.0), (1.2, 1.6), (5.001e9, 5.002e9), (1.0, 1.0)]:
            words = [words for _, words in Axis(least, most, 0.0, 900.0).labels(8, text)]
            assert words
            assert len({*words}) == len(words)
    labels = Axis(0.0, 1.0, 0.0, 100.0).labels(8, "{:.3f} seconds".format, room=4.0)
    assert len(labels) < 3


def test_greys_of_one_picture_are_told_apart() -> None:
    names = r"--(paper|track|bubble|states|optimizer|buffers): #(\w+)"
    for words in style().split("@media"):
        found = dict(re.findall(names, words))
        greys = {
            name: sum(int(g[i : i + 2], 16) for i in (0, 2, 4)) / 3 for name, g in found.items()
        }
        assert len(greys) == 6
        for one, other in itertools.combinations(greys, 2):
            if {one, other} not in ({"track", "paper"}, {"bubble", "buffers"}):
                assert abs(greys[one] - greys[other]) > 15, (one, other)


def test_words_are_escaped() -> None:
    picture = Drawing(10, 10, 'a "<b>" & c')
    picture.text(0, 0, "<script>")
    picture.box(0, 0, 1, 1, "track", title="<x>")
    ET.fromstring(picture.file())
    assert "<script>" not in str(picture)


def test_a_program_is_drawn_call_by_call(tmp_path: Path) -> None:
    plan = plans.megatron()
    plan.draw(tmp_path / "graph.svg")
    with pytest.raises(ap.InvalidInput, match=r"is a \.svg file"):
        plan.draw(tmp_path / "graph.png")
    text = (tmp_path / "graph.svg").read_text()
    words = [one.text for one in ET.fromstring(text).iter(f"{SVG}text")]
    rows = [row for block in program_blocks(plan, module_tree(plan)) for row in block.rows]
    assert text.count('class="call"') + text.count('class="moved"') == len(rows)
    assert {row.call.operator for row in rows} <= {*words}
    assert any(word and "over tp, back: " in word for word in words)
    assert any(word and word.startswith("layers.{0..5}, 6 times") for word in words)
