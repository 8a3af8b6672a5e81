"""The command `autopar simulate`."""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
import pkgutil

import pytest

from autopar import pipeline
from autopar.commands.parsers import simulate as add_arguments
from autopar.commands.simulate import run
from autopar.errors import InvalidInput


def simulated(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def test_json(capsys):
    line = "chimera --stages 8 --microbatches 8 --backward 2 --json"
    assert simulated(*line.split()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["makespan"] == 36
    assert figures["bubble_ratio"] == pytest.approx(1 / 3)
    assert figures["idle"] == [12] * 8
    assert figures["peak_activations"] == [5, 6, 7, 8, 8, 7, 6, 5]
    assert figures["weights"] == 2


def test_json_has_no_infinite_numbers(capsys):
    line = "1f1b --stages 2 --microbatches 2 --forward 1e308 --json"
    assert simulated(*line.split()) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert figures["makespan"] is None


def test_options_and_latency(capsys):
    line = "chimera --stages 8 --microbatches 8 --pipes 4 --latency 0.25 --json"
    assert simulated(*line.split()) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == 4
    line = "interleaved --stages 8 --microbatches 32 --chunks 2 --latency 0.25 --json"
    assert simulated(*line.split()) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 114


def test_a_planned_schedule_is_planned_for_the_same_costs(capsys):
    line = "chimera-zb --stages 4 --microbatches 8 --forward 1 --backward 3 --json"
    assert simulated(*line.split()) == 0
    made = pipeline.schedule("chimera-zb", stages=4, microbatches=8, backward=3)
    expected = pipeline.simulate(made, backward=3).makespan
    assert json.loads(capsys.readouterr().out)["makespan"] == expected


def test_drawing(capsys):
    line = "chimera --stages 4 --microbatches 4 --sync eager --sync-cost 1"
    assert simulated(*line.split()) == 0
    out = capsys.readouterr().out
    assert "rank 0 |F0 F1 ...f2 b2" in out
    assert "peak activations  3 4 4 3" in out
    assert "1 uncovered, step time 17" in out


@pytest.mark.parametrize(("columns", "options", "width"), [("80", "", 80), ("20", "", 60),
                                                           ("80", "--width 120", 120)])  # fmt: skip
def test_a_drawing_keeps_to_its_width(columns, options, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for line in ("chimera --stages 8 --microbatches 8", "zb-h1 --stages 4 --microbatches 4"):
        assert simulated(*line.split(), *options.split()) == 0
        rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("rank ")]
        assert len({len(row) for row in rows}) == 1
        assert len(rows[0]) <= width
        assert all("F" in row for row in rows)


def test_file(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    pipeline.save(pipeline.schedule("gems", stages=4, microbatches=4), path)
    assert simulated(str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 39
    with pytest.raises(InvalidInput, match="own sizes"):
        simulated(str(path), "--stages", "4")


@pytest.mark.parametrize(
    "line",
    ["1f1b --microbatches 8", "1f1b --stages 8", "nothing --stages 2 --microbatches 2",
     "1f1b --stages 2 --microbatches 2 --pipes 2", "chimera --stages 3 --microbatches 2",
     "1f1b --stages 0 --microbatches 2", "1f1b --stages 2 --microbatches 0",
     "1f1b --stages 99999999999999999999 --microbatches 2",
     "1f1b --stages 2 --microbatches 99999999999999999999",
     "interleaved --stages 2 --microbatches 2 --chunks 9999999",
     "chimera --stages 2 --microbatches 2 --pipes 99999999999999999999"],
)  # fmt: skip
def test_bad_input(line):
    with pytest.raises(InvalidInput):
        simulated(*line.split())


def test_the_tours_in_the_docstrings():
    names = [
        module.name for module in pkgutil.walk_packages(pipeline.__path__, "autopar.pipeline.")
    ]
    for name in ["autopar.pipeline", *names]:
        assert doctest.testmod(importlib.import_module(name)).failed == 0, name
