"""The page of a plan says what the plan says, in one file, to people who see it or do not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.errors import InvalidInput
from autopar.plans.plan import Plan
from autopar.report.run_charts import TrainingRun, draw_lines
from autopar.report.trace import events_of
from autopar.text.units import bytes_text, seconds_text
from tests import chromium
from tests.report import plans

needs_chromium = pytest.mark.skipif(chromium.COMMAND is None, reason="chromium is not installed")


class Reader(HTMLParser):
    """Words, and elements that are left open."""

    EMPTY = ("meta", "link", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.names.add(about.get("id") or "")
        self.links += filter(None, [about.get("href"), about.get("src")])
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.words += [data.strip()] if data.strip() else []


def written(plan: Plan, folder: Path, **about: object) -> str:
    path = folder / "plan.html"
    plan.report(path, **about)  # type: ignore[arg-type]
    return path.read_text()


@pytest.mark.parametrize("make", [plans.pipelined, plans.chosen, plans.megatron])
def test_it_is_whole_and_needs_nothing_else(make: object, tmp_path: Path) -> None:
    assert callable(make)
    reader = Reader(text := written(make(), tmp_path))
    assert reader.open == []
    inside = {link.removeprefix("#") for link in reader.links if link.startswith("#")}
    assert inside <= reader.names
    assert {link for link in reader.links if not link.startswith("#")} == {"data:,"}
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize("make", [plans.pipelined, plans.chosen, plans.megatron])
def test_its_numbers_are_those_of_the_plan(make: object, tmp_path: Path) -> None:
    assert callable(make)
    plan: Plan = make()
    data, words = plan.to_json(), Reader(written(plan, tmp_path)).words
    assert seconds_text(plan.seconds) in words
    assert bytes_text(data["memory"]["peak"]) in words
    assert str(data["microbatches"]) in words
    for movement in data["movements"]:
        assert any(f"{bytes_text(movement['bytes'])} over" in word for word in words)
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        assert bytes_text(data["memory"]["at_peak"][kind]) in words
    for one in data["alternatives"]:
        assert seconds_text(one["seconds"]) in words
        assert bytes_text(one["memory"]) in words
    for type_ in data["parameters"].values():
        assert type_ in words


@pytest.mark.parametrize("room", [1.2, 100.0])
def test_a_line_is_spoken_of_where_it_is_drawn(room: float, tmp_path: Path) -> None:
    plan = plans.pipelined()
    text = written(replace(plan, limit=room * plan.memory.peak), tmp_path)
    section = re.search(r'<section id="memory">.*?</section>', text, re.DOTALL)
    assert section is not None
    assert ('class="limit"' in section[0]) == ("a dashed line" in section[0]) == (room < 2)


def test_equal_blocks_are_shown_once(tmp_path: Path) -> None:
    words = Reader(written(plans.megatron(), tmp_path)).words
    assert "{0..5}" in words
    assert words.count("x 6") == 2  # in the tree and in the program


def test_a_run_is_shown_beside_its_prediction(tmp_path: Path) -> None:
    plan = plans.pipelined()
    run = TrainingRun(
        [3.0, 2.0, 1.5], [0.2, 0.1, 0.1], 0.05, 1000, (), {"one process": [3.0, 2.0, 1.4]}
    )
    text = " ".join(Reader(written(plan, tmp_path, run=run, title="A <run>")).words)
    assert text.startswith("A <run>")
    assert "From 3 to 1.5 in 3 steps. The largest difference from one process is 1.0e-01." in text
    assert "A step takes 100 ms (median), 10 ktokens/s, " in text
    assert "% of the FLOP/s of its devices (MFU); predicted were 50 ms" in text
    assert ": it takes 2 times as long as predicted." in text


@pytest.mark.parametrize(
    "run",
    [
        TrainingRun([float("nan"), 2.0], [0.1, 0.1], 0.05),
        TrainingRun([1.0, float("inf"), 1.0], [0.1], 0.05),
        TrainingRun([], [], 0.0),
        TrainingRun([1.0], [0.0], 0.05, tokens=10),
        TrainingRun([1.0], [0.1], 0.0, others={"none": [], "odd": [float("inf")]}),
    ],
)
def test_a_run_of_any_numbers_is_shown(run: TrainingRun, tmp_path: Path) -> None:
    text = written(plans.megatron(), tmp_path, run=run)
    pictures = re.findall(r"<svg.*?</svg>", text)
    assert pictures
    assert not any(re.search(r"[^a-z]nan[^a-z]|[^a-z]inf[^a-z]", one) for one in pictures)
    for losses in [run.losses, *run.others.values()]:
        odd = [at for at, loss in enumerate(losses, 1) if not math.isfinite(loss)]
        assert not odd or f"is not finite in {len(odd)}, the first is step {odd[0]}." in text


def test_seconds_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidInput, match="seconds of a step are a number"):
        TrainingRun([1.0], [float("nan")], 0.1)


def test_each_of_many_runs_is_drawn() -> None:
    many = {f"a run with a long name, number {number}": [3.0, 2.0, number] for number in range(9)}
    picture = str(draw_lines(many, "loss", str))
    assert (
        len(re.findall(r'<polyline class="series\d" [^>]*,[^>]* [^>]*,[^>]* [^>]*/>', picture)) == 9
    )
    places = set(re.findall(r'<text class="words" x="([^"]*)" y="([^"]*)">a run', picture))
    assert len(places) == 9
    assert all(float(x) < 960 for x, _ in places)


def test_costs_say_how_many_there_are_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(plans.megatron(), tmp_path)
    rows = whole[whole.index('id="costs"') :].split("</table>")[0].count("<tr")
    assert "These are the" not in whole
    monkeypatch.setattr("autopar.report.page._COSTS", 7)
    assert f"These are the 7 that take most of {rows - 1};" in written(plans.megatron(), tmp_path)


def test_a_recording_is_shown_above_what_was_simulated(tmp_path: Path) -> None:
    plan = plans.pipelined()
    run = TrainingRun([1.0], [0.1], plan.seconds, events=events_of(plan))
    text = written(plan, tmp_path, run=run)
    assert text.index('id="pipeline"') < text.index("<h3>Measured") < text.index("<h3>Predicted")
    count = sum(map(len, plan.pipelining.schedule.orders))  # type: ignore[union-attr]
    boxes = len(re.findall(r'<rect class="[FB][01]" [^>]*><title>', text))
    assert boxes >= 2 * count


def test_both_schedules_have_one_axis(tmp_path: Path) -> None:
    plan = plans.pipelined()
    slow = [replace(one, start=3 * one.start, end=3 * one.end) for one in events_of(plan)]
    text = written(plan, tmp_path, run=TrainingRun([], [], plan.seconds, events=slow))
    measured, _, predicted, _ = re.findall(r'<svg [^>]*aria-label="chimera: .*?</svg>', text)
    ticks = r'<text class="middle" x="([^"]*)"[^>]*>([^<]*s)</text>'
    assert re.findall(ticks, measured) == re.findall(ticks, predicted) != []


def test_a_recording_and_figures_of_steps_are_a_run(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), Square())
    pm = ap.parallelize(model, (x,), mesh=ap.Mesh(pp=2), microbatches=2)
    told: list[ap.StepFigures] = []
    pm.on_step(told.append)
    recording = pm.record(steps=2)
    for _ in range(3):
        pm.step(x)
    assert [one.loss for one in recording.figures] == [one.loss for one in told[:2]]
    text = " ".join(Reader(written(pm.plan, tmp_path, run=recording)).words)
    assert "in 2 steps." in text
    assert "Measured, in the last step" in text
    text = " ".join(Reader(written(pm.plan, tmp_path, run=told)).words)
    assert "in 3 steps." in text
    assert "Measured, in the last step" not in text
    with pytest.raises(InvalidInput, match=r"pm\.on_step\(steps\.append\)"):
        pm.plan.report(tmp_path / "plan.html", run="measured.json.gz")  # type: ignore[arg-type]


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_one_way_alone_is_shown_with_its_parts(tmp_path: Path) -> None:
    words = Reader(written(plans.megatron(), tmp_path)).words
    assert any(word.startswith("One way to run a step was weighed") for word in words)
    assert "chosen" in words


def test_where_it_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="page of a plan can be written"):
        plans.megatron().report(tmp_path / "file" / "plan.html")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    plans.chosen().report(path, run=TrainingRun([2.0, 1.0], [0.1, 0.1], 0.1))
    with chromium.browser() as browser:
        try:
            browser.send("Browser.getVersion")
        except (TimeoutError, OSError) as error:
            pytest.skip(f"chromium does not start here: {error}")
        yield browser.open(path)


# What is wrong with the pictures that are shown, but for those of the program's lines.
READ_PICTURES = """(() => {
  const box = e => e.getBoundingClientRect(), wrong = [];
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  document.querySelectorAll("details").forEach(e => e.open = true);
  for (const picture of document.querySelectorAll("main section:not(#program) svg")) {
    const words = [...picture.querySelectorAll("text")].filter(e => box(e).width);
    const dots = [...picture.querySelectorAll("circle")].map(box);
    if (box(picture).right > innerWidth) wrong.push("wide: " + picture.getAttribute("aria-label"));
    words.forEach((word, at) => {
      if (box(word).height < 9) wrong.push("small: " + word.textContent);
      if (dots.some(dot => meet(box(word), dot))) wrong.push("covers: " + word.textContent);
      for (const other of words.slice(at + 1))
        if (meet(box(word), box(other))) wrong.push(word.textContent + " | " + other.textContent);
    });
  }
  return wrong;
})()"""


@needs_chromium
class TestInABrowser:
    def test_it_asks_for_nothing_and_complains_of_nothing(self, opened: chromium.Page) -> None:
        assert opened.complaints == []
        assert opened.run("document.querySelectorAll('svg').length") > 5

    def test_search_finds_a_parameter_of_any_block(self, opened: chromium.Page) -> None:
        opened.resize(1000, 500)
        opened.press("/")
        opened.write("layers.4.up.weight")
        assert opened.run("document.getElementById('found').textContent") == "1 found"
        assert "weight" in opened.run("document.querySelector('.hit').textContent")
        place = "document.querySelector('.hit').getBoundingClientRect()"
        assert 0 <= opened.run(f"{place}.top") < opened.run(f"{place}.bottom") <= 500
        for absent in ("nothing.of.this", "layers.99.up.weight", "layers.6", "5.weight"):
            opened.run(f"search.value = '{absent}'; look()")
            assert opened.run("document.getElementById('found').textContent") == "0 found"

    @pytest.mark.parametrize("name", ["ayers.4.UP.wei", "layers.{0..5}.up.weight", "head.weight"])
    def test_search_takes_parts_of_names_and_all_names_of_a_parameter(
        self, opened: chromium.Page, name: str
    ) -> None:
        opened.run(f"search.value = '{name}'; look()")
        assert opened.run("document.getElementById('found').textContent") == "1 found"
        opened.run("search.value = ''; look()")

    def test_what_a_search_unfolds_it_folds_again(self, opened: chromium.Page) -> None:
        unfolded = "[...document.querySelectorAll('.tree details')].map(one => one.open)"
        opened.run("search.value = ''; look()")
        before = opened.run(unfolded)
        opened.run("search.value = 'UP.weight'; look()")
        assert opened.run(unfolded) != before
        opened.run("search.value = ''; look()")
        assert opened.run(unfolded) == before
        assert opened.run("document.querySelector('.hit')") is None

    def test_columns_sort_by_value_with_the_keyboard(self, opened: chromium.Page) -> None:
        column = "[...document.querySelectorAll('#costs tbody td:nth-child(3)')]"
        seconds = f"{column}.map(cell => Number(cell.dataset.value))"
        before = opened.run(seconds)
        assert before == sorted(before, reverse=True)
        opened.run("document.querySelectorAll('#costs th button')[2].focus()")
        opened.press("Enter", "\r")
        assert opened.run(seconds) == before
        opened.press("Enter", "\r")
        assert opened.run(seconds) == sorted(before)

    def test_modules_unfold_with_the_keyboard(self, opened: chromium.Page) -> None:
        first = "document.querySelector('.tree details')"
        opened.run(f"{first}.open = false; {first}.firstElementChild.focus()")
        opened.press("Enter", "\r")
        assert opened.run(f"{first}.open")

    @pytest.mark.parametrize("width", [360, 800, 1400])
    def test_it_is_as_wide_as_the_screen(self, opened: chromium.Page, width: int) -> None:
        opened.resize(width, 800)
        assert opened.run("document.documentElement.scrollWidth") == width

    @pytest.mark.parametrize("width", [390, 1280])
    def test_pictures_fit_and_their_words_can_be_read(
        self, opened: chromium.Page, width: int
    ) -> None:
        opened.resize(width, 800)
        assert opened.run(READ_PICTURES) == []

    def test_it_follows_the_colours_that_are_asked_for(self, opened: chromium.Page) -> None:
        back = "getComputedStyle(document.body).backgroundColor"
        opened.media(prefers_color_scheme="light")
        light = opened.run(back)
        opened.media(prefers_color_scheme="dark")
        assert opened.run(back) != light
        opened.media()

    def test_on_paper_all_is_unfolded(self, opened: chromium.Page) -> None:
        opened.send("Page.printToPDF")
        assert opened.run("[...document.querySelectorAll('details')].every(one => one.open)")
