"""autopar plan, explain and diff: a model's way to the command line, and every wrong turn."""

from __future__ import annotations

import errno
import io
import json
import os
import sys

import pytest

import autopar as ap
from autopar.cli import main

BUILDERS = """
from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

class Small(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def small():
    with torch.device("meta"):
        return Small(*(nn.Linear(64, 64) for _ in range(3))), (torch.zeros(8, 64),)

def other():
    with torch.device("meta"):
        return nn.Linear(64, 32), (torch.zeros(8, 64),), {}

def broken():
    raise RuntimeError("no such checkpoint")

def nothing():
    return 3

def leaves():
    print("about to leave")
    sys.exit(3)

class Unspeakable(BaseException):
    def __str__(self):
        raise TypeError("a failure of its own")

def unspeakable():
    raise Unspeakable

class Leaving(nn.Linear):
    def forward(self, x):
        sys.exit(0)

def leaving():
    return Leaving(8, 8), (torch.zeros(8, 8),)

class Noisy(nn.Linear):
    def forward(self, x):
        print("in forward")
        return super().forward(x).square().mean()

@dataclass
class Sizes:
    width: int = 8

def noisy():
    return Noisy(Sizes().width, 8), (torch.zeros(8, 8),)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "builders.py").write_text(BUILDERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str, capsys) -> tuple[int, str, str]:
    """Exit code, what was printed, and what was said to the user's terminal."""
    code = main(words.split())
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return code, said.out, said.err


def test_plan_then_explain_then_diff(folder, capsys):
    for name, mesh in (("one", "dp=8"), ("two", "dp=2,tp=4")):
        code, text, progress = run(
            f"plan builders.py:small --mesh {mesh} --out {name}.json", capsys
        )
        assert code == 0
        assert f"saved to {name}.json" in text
        assert text.startswith("plan on Mesh(dp=")
        assert "capture: Small" in progress
    code, text, _ = run("explain one.json 1 --model builders.py:small", capsys)
    assert code == 0
    assert "chosen: " in text
    code, text, _ = run("explain one.json 1.weight --model builders.py:small --json", capsys)
    assert json.loads(text)["what"] == "parameter"
    code, text, _ = run("diff one.json two.json", capsys)
    assert code == 0
    assert "--model file.py:function" in text
    code, text, _ = run("diff one.json two.json --model builders.py:small --json", capsys)
    data = json.loads(text)
    assert data["settings"]["mesh"] == [{"dp": 8}, {"dp": 2, "tp": 4}]
    assert data["cost"]["seconds"][0] > 0


def test_what_if_is_asked_of_a_plan_or_a_model(folder, capsys):
    run("plan builders.py:small --mesh dp=4 --mode data --out plan.json", capsys)
    for words in ("plan.json builders.py:small", "builders.py:small --mesh dp=4 --mode data"):
        changes = "--what-if nodes=2,batch=2x,bandwidth=100GB/s,memory=2KB --json"
        code, text, _ = run(f"explain {words} {changes}", capsys)
        assert code == 0
        found = json.loads(text)
        assert found["then"]["way"]["mesh"] == {"dp": 8}
        assert (found["then"]["sizes"]["batch"], found["then"]["bandwidth"]) == (16, 100e9)
        assert (found["then"]["limit"], found["then"]["fits"], found["now"]["fits"]) == (2e3, 0, 1)
    code, text, _ = run("explain builders.py:small states --mesh dp=4 --mode data", capsys)
    assert text.startswith("states: whole")
    about = "--mesh dp=4 --mode data"
    for word, kind in (("none", "nothing"), ("full", "3 in full")):
        code, text, _ = run(
            f"explain builders.py:small recompute {about} --recompute {word}", capsys
        )
        assert text.startswith(f"recompute: {kind}")


def test_plan_prints_json(folder, capsys):
    code, text, progress = run(
        "plan builders:small --cluster dgx-a100 --memory 10GB --microbatches 2 --json", capsys
    )
    data = json.loads(text)
    assert code == 0
    assert data["microbatches"] == 2
    assert data["search"]["gap"] == 0
    assert len(data["search"]["considered"]) > 1
    assert progress == ""


@pytest.mark.parametrize(
    "words",
    [
        "plan SPEC --mesh dp=2 --json",
        "plan --model SPEC --mesh dp=2 --json",
        "plan --mesh dp=2 SPEC --json",
        "plan --mesh dp=2 --json --model=SPEC",
        "explain plan.json 0 SPEC --json",
        "explain plan.json 0 --json SPEC",
        "explain --model SPEC plan.json 0 --json",
        "diff plan.json plan.json SPEC --json",
        "diff plan.json plan.json --json --model SPEC",
    ],
)
def test_a_model_is_given_by_its_place_or_by_name(folder, capsys, words):
    run("plan builders.py:small --mesh dp=2 --out plan.json", capsys)
    code, text, _ = run(words.replace("SPEC", "builders.py:small"), capsys)
    assert code == 0
    assert json.loads(text)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("plan", "a model is needed: SPEC, or --model SPEC"),
        ("diff", "the following arguments are required: FIRST, SECOND"),
        ("plan a.py:a --model a.py:a", "--model: not allowed with argument"),
        ("plan a.py:a b.py:b", "unrecognized arguments: b.py:b"),
        ("verify a.py:a --masch dp=2", "unrecognized arguments: --masch dp=2"),
        ("simulate 1f1b --modell x", "unrecognized arguments: --modell x"),
        ("demo SPEC", "unrecognized arguments: SPEC"),
        ("completion tcsh", "invalid choice: 'tcsh'"),
        ("doctor --ranks two", "invalid int value: 'two'"),
    ],
)
def test_usage_errors_show_the_usage_of_their_command(words, named, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"usage: autopar {words.split()[0]} ")
    assert named in said.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("plan builders.py", "file.py:function"),
        ("plan missing.py:small", "missing.py"),
        ("plan missing.module:small", "No module named"),
        ("plan builders.py:smal", "small"),
        ("plan builders.py:broken", "no such checkpoint"),
        ("plan builders.py:nothing", "int from builders.py:nothing"),
        ("plan builders.py:leaves", "raised sys.exit(3)"),
        ("plan builders.py:unspeakable", "Unspeakable, which cannot be printed"),
        ("plan builders.py:leaving --mesh dp=2", "given:  sys.exit(0)"),
        ("verify builders.py:leaving --mesh dp=2", "builders.py:41: sys.exit(0)"),
        ("plan builders.py:small --out builders.py", "it is what the command is made of"),
        ("report plan.json --model builders.py:small --out plan.json", "is made of"),
        ("report builders.py:small --model builders.py:noisy", "a page is of one model"),
        ("report plan.json --model builders.py:noisy", "0.weight"),
        ("plan builders.py:small --mesh dp=²", "--mesh dp=2,tp=4"),
        ("plan builders.py:small --microbatches ²", "microbatches"),
        ("plan builders.py:small --pipeline ²", "pipeline"),
        ("plan builders.py:small --mesh self=0", "self=0"),
        ("plan builders.py:small --memory 1e999", "40GB"),
        ("doctor --ranks 99999999999999999999", "at most 256"),
        ("plan mistyped.py:small", "at:     mistyped.py:2: def small(:"),
        ("plan lacking.py:small", "at:     lacking.py:3: import no_such_package"),
        ("plan lacking:small", "at:     lacking.py:3: import no_such_package"),
        ("plan missing.module:small", "at:     missing.module"),
        ("plan builders.py:small --mesh 4x2", "--mesh dp=2,tp=4"),
        ("plan builders.py:small --mesh dp=64", "64 ranks on 8 devices"),
        ("plan builders.py:small --memory lots", "40GB"),
        ("plan builders.py:small --mesh dp=2 --memory 1KB", "the least that was found takes"),
        ("plan builders.py:small --cluster dgx-h200x", "dgx-h100"),
        ("plan builders.py:small --cluster cluster.toml --nodes 2", "--nodes"),
        ("plan builders.py:small --cluster cluster.toml", "cluster.toml:5"),
        ("plan builders.py:small --out builders.py/plan.json", "builders.py/plan.json: "),
        ("plan builders.py:small --out .", ".: it is a folder"),
        ("report builders.py:small --out .", ".: it is a folder"),
        ("compare missing.json missing.json", "missing.json"),
        ("compare builders.py builders.py", "builders.py"),
        ("calibrate --ranks 1", "--ranks 1"),
        ("calibrate --out builders.py/machine.toml", "builders.py/machine.toml: "),
        ("simulate chimera --stages 3 --microbatches 3", "chimera"),
        ("simulate missing.csv", "missing.csv"),
        ("simulate 1f1b --stages 2 --microbatches 2 --width -5", "--width"),
        ("demo --steps 0", "--steps is a whole number"),
        ("doctor --ranks 0", "--ranks is a whole number"),
        ("report plan.json --model builders.py:small --mesh dp=2 --memory 1MB", "--mesh, --memory"),
        ("plan builders.py:small --cluster piz-daint --nodes 99999999999", "99999999999 nodes"),
        ("verify builders.py:small --mesh dp=2 --steps 0", "steps"),
        ("explain plan.json 0", "--model file.py:function"),
        ("explain builders.py:small", "one thing is explained"),
        ("explain builders.py:small 0 --search", "one thing is explained"),
        ("explain plan.json 0 builders.py:small --what-if nodes=4", "one thing is explained"),
        ("explain plan.json 0 builders.py:small --mesh dp=2", "--mesh"),
        ("explain builders.py:small --what-if node=4", "nodes=4,bandwidth=2x"),
        ("explain builders.py:small --mesh dp=8 --what-if nodes=1,bandwidth=2x", "inside="),
        ("explain missing.json 0 --model builders.py:small", "missing.json"),
        ("explain builders.py 0 --model builders.py:small", "no JSON"),
        ("explain plan.json 0 --model builders.py:other", "0.weight"),
        ("explain plan.json 0.wait --model builders.py:small", "0.weight"),
        ("diff plan.json builders.py", "no JSON"),
    ],
)
def test_errors_are_clean_and_exit_with_two(folder, capsys, words, named):
    (folder / "cluster.toml").write_text(
        "[device.a]\nflops = { f32 = 1e12 }\nmemory = 16e9\nbandwidth = 1e12\nflopz = 3\n"
        '[[nodes]]\ndevice = "a"\ndevices = 4\nlink = { alpha = 1e-6, bandwidth = 1e10 }\n'
    )
    (folder / "mistyped.py").write_text("import torch\ndef small(:\n    pass\n")
    (folder / "lacking.py").write_text("print('loading')\n\nimport no_such_package\n")
    if "plan.json" in words:
        run("plan builders.py:small --mesh dp=8 --out plan.json", capsys)
    code, text, errors = run(words, capsys)
    assert text == ""  # what the user's code prints is no result
    errors = errors[errors.index(f"autopar {words.split()[0]}: ") :]
    assert code == 2
    assert named in errors
    assert "remedy:" in errors


def test_report_writes_a_page_of_a_model_or_a_plan(capsys, tmp_path):
    spec, page = "autopar.examples:gpt", tmp_path / "page.html"
    assert main(["report", spec, "--mesh", "dp=2,tp=4", "--out", str(page), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["page"] == str(page)
    text = page.read_text()
    assert "dp=2, tp=4" in text
    saved = tmp_path / "plan.json"
    assert main(["plan", spec, "--mesh", "dp=2,tp=4", "--out", str(saved)]) == 0
    page.unlink()
    assert main(["report", str(saved), "--model", spec, "--out", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"to look at: {page}"
    assert "dp=2, tp=4" in page.read_text()


def test_a_schedule_is_read_from_its_file(folder, capsys):
    by_hand = ap.pipeline.schedule("gpipe", stages=2, microbatches=4)
    words = "plan builders.py:small --mesh pp=2,dp=2 --microbatches 4 --json --schedule"
    for path in ("mine.csv", "mine.txt"):
        ap.pipeline.save(by_hand, folder / path)
        code, text, _ = run(f"{words} {path}", capsys)
        assert code == 0
        found, by_name = json.loads(text), json.loads(run(f"{words} gpipe", capsys)[1])
        assert found["cost"] == by_name["cost"]
    code, _, errors = run(f"{words} none.csv", capsys)
    assert code == 2
    assert "none.csv: No such file or directory" in errors


def test_report_of_a_plan_wants_its_model(capsys, tmp_path):
    assert main(["report", str(tmp_path / "plan.json")]) == 2
    assert "remedy: --model file.py:function" in capsys.readouterr().err


def test_a_plan_is_known_by_its_content(folder, capsys):
    run("plan builders.py:small --mesh dp=2 --out saved", capsys)
    (folder / "saved").rename(folder / "builders.py:saved")
    for words in ("builders.py:saved --model builders.py:small --mesh dp=8", "builders.py:saved"):
        code, _, errors = run(f"report {words}", capsys)
        assert code == 2
        assert "remedy:" in errors
    code, text, _ = run("report builders.py:saved --model builders.py:small --json", capsys)
    assert code == 0
    assert json.loads(text)["mesh"] == {"dp": 2}


def test_json_is_all_that_is_printed(folder, capfd, monkeypatch):
    """To the stdout of the process, whatever a model prints, or what it calls."""
    builders = folder / "builders.py"
    loud = BUILDERS.replace("import sys", "import os, sys\nos.write(1, b'while loading\\n')", 1)
    builders.write_text(loud)
    with open(1, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        for words in ("plan builders.py:noisy", "verify builders.py:noisy --steps 1"):
            assert main([*words.split(), "--mesh", "dp=2", "--json"]) == 0
            printed, told = capfd.readouterr()
            assert json.loads(printed)
            assert told.count("in forward") == told.count("in forward\n") > 0
            assert "while loading" in told
        print("as before")
    assert capfd.readouterr().out == "as before\n"


class Full(io.StringIO):
    """A device without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nobody_has_to_read_what_is_told(folder, capsys, monkeypatch):
    words = "simulate 1f1b --stages 2 --microbatches 2 --json"
    with monkeypatch.context() as inside:
        inside.setattr(sys, "stdout", Full())
        assert main(words.split()) == 2
    assert "stdout: No space left on device" in capsys.readouterr().err
    for stream in (Full(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(words.split()) == 0
        assert main(["plan", "builders.py:broken"]) == 2
        assert main(["plan", "builders.py:small", "--mesh", "dp=2"]) == 0
    monkeypatch.setattr(sys, "stdout", None)
    assert main(words.split()) == 0
