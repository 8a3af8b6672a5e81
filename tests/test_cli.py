"""The command line: its commands, exit codes and clean errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from autopar.cli import main
from autopar.commands import COMMANDS, summary


def test_every_command_is_summed_up_in_the_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in COMMANDS:
        assert summary(name)
        assert summary(name)[:30] in text


def test_simulate_prints_json(capsys):
    assert main(["simulate", "1f1b", "--stages", "4", "--microbatches", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 33


def test_errors_are_clean_and_exit_with_two(capsys):
    assert main(["simulate", "chimera", "--stages", "3", "--microbatches", "8"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("autopar simulate: ")
    assert "remedy:" in output.err
    assert "Traceback" not in output.err + output.out


def test_doctor_checks_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [check["name"] for check in report["checks"]][-1] == "processes"


def test_doctor_says_what_is_wrong_and_what_to_do(capsys):
    assert main(["doctor", "--ranks", "0"]) == 1
    output = capsys.readouterr().out
    assert "WRONG  processes" in output
    assert "remedy: --ranks 2" in output


def test_demo_trains_on_four_processes_as_on_one(capsys):
    assert main(["demo", "--steps", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["parallel"]) == len(figures["single"]) == 4
    assert figures["difference"] < 1e-9
    assert figures["ok"]


def test_demo_fails_when_the_losses_differ(capsys, monkeypatch, tmp_path):
    from autopar.commands import demo

    monkeypatch.setattr(demo, "launch", lambda *_, **__: [([1.0], None)])
    monkeypatch.setattr(demo, "PAGE", tmp_path / "demo.html")
    assert main(["demo", "--steps", "1"]) == 1
    assert "DIFFER" in capsys.readouterr().out
    assert not (tmp_path / "demo.html").exists()


def test_demo_ends_with_a_page_of_its_run(capsys, monkeypatch, tmp_path):
    from autopar.commands import demo

    monkeypatch.setattr(demo, "PAGE", tmp_path / "pages" / "demo.html")
    assert main(["demo", "--steps", "3"]) == 0
    page = (tmp_path / "pages" / "demo.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"to look at: {demo.PAGE}"
    assert "The largest difference from one process is" in page
    assert "Pipeline, measured" in page


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_ends_all_processes():
    demo = subprocess.Popen(
        [sys.executable, "-m", "autopar.cli", "demo", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
    )
    try:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("step "):
            assert demo.poll() is None
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    except BaseException:
        os.killpg(demo.pid, signal.SIGKILL)
        raise
    assert demo.returncode == 130
    assert errors.strip() == "autopar demo: stopped"
    deadline = time.monotonic() + 10
    while _is_alive(demo.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _hear_interrupts():
    """A shell starts what runs in the background with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
