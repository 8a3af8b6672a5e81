"""The command line: its commands, exit codes and clean errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

import autopar as ap
from autopar.cli import main
from autopar.cluster.pace import Pace
from autopar.commands import COMMANDS, demo
from autopar.commands.parsers import (
    PARSERS,
    CommandParser,
    examples,
    make_parser,
    schedule_options,
    summary,
)

# Options that must be given, or that repeat a positional.
NO_DEFAULT = {"model", "stages", "microbatches", *schedule_options()}


def test_every_command_is_summed_up_in_the_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in COMMANDS:
        assert summary(name)
        assert summary(name)[:30] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_examples_that_it_takes(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert examples(name)
    assert "--json" in text or name == "completion"
    for line in examples(name):
        assert f"  {line}\n" in text
        assert len(line) <= 78
        words = shlex.split(line.partition(" >")[0])[1:]
        assert make_parser("", "").parse_args(words).command == name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_by_a_sentence_with_its_default(name):
    parser = CommandParser()
    PARSERS[name](parser)
    for action in parser._actions:
        assert re.fullmatch(r"[A-Z].*\.", action.help or "") or action.dest == "help", action
        if action.option_strings and action.nargs != 0 and action.dest not in NO_DEFAULT:
            assert "Default: " in action.help, action


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_their_words(shell, capsys):
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert "microbatches" in printed
    if shell == "bash":
        asked = {
            "autopar ": {*COMMANDS},
            "autopar explain --j": {"--json"},
            "autopar plan --mode ": {"auto", "propagate", "data"},
            "autopar report --cluster d": {"dgx-a100", "dgx-h100", "dgx-v100"},
            "autopar verify --schedule g": {"gems", "gpipe"},
            "autopar completion ": {"bash", "zsh", "fish", "--help"},
        }
        for line, found in asked.items():
            words = line.split(" ")
            quoted = " ".join(map(shlex.quote, words))
            script = (
                f"{printed}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _autopar\n"
                'printf "%s\\n" "${COMPREPLY[@]}"'
            )
            done = subprocess.run(
                ["bash", "-c", script], capture_output=True, text=True, check=True
            )
            assert set(done.stdout.split()) == found


def test_a_failure_of_autopars_own_is_told_as_such(capsys, monkeypatch):
    from autopar.commands import doctor

    monkeypatch.setattr(doctor, "check_processes", lambda ranks: 1 / 0)
    assert main(["doctor"]) == 3
    assert "an error of autopar's own: ZeroDivisionError" in capsys.readouterr().err


def test_help_loads_no_torch():
    program = "import sys, autopar_start\n"
    program += f"for words in [], *([name] for name in {[*COMMANDS]}):\n"
    program += "    sys.argv = ['autopar', *words, '--help']\n"
    program += "    try: autopar_start.main()\n"
    program += "    except SystemExit as end: print(end.code, file=sys.stderr)\n"
    program += "print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.split() == ["0"] * (1 + len(COMMANDS)) + ["False"]


def test_the_installed_command_is_heard_before_torch_is_loaded():
    program = "import autopar_start, sys; sys.argv = ['autopar', 'plan', 'no.py:model']"
    program += "; sys.exit(autopar_start.main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("loading torch\nautopar plan: ")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_while_torch_loads_stops_in_a_line(tmp_path):
    """Whatever the modules that load make of it."""
    (tmp_path / "autopar").mkdir()
    (tmp_path / "autopar" / "__init__.py").touch()
    (tmp_path / "autopar" / "cli.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except BaseException:\n    raise ImportError\n"
    )
    program = "import sys; sys.argv = ['autopar', 'verify', 'a:b']; import autopar_start"
    program += f"; sys.path.insert(0, {str(tmp_path)!r}); sys.exit(autopar_start.main())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, preexec_fn=_hear_interrupts
    )
    assert (done.returncode, done.stderr) == (130, "autopar verify: stopped\n")


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m autopar.cli simulate chimera --stages 8 --microbatches 64"
    command += " --json | true; echo ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "141\n"
    assert done.stderr == ""


def test_calibrate_measures_ten_plans_and_keeps_what_it_found(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "new" / "machine.toml"
    assert main(["calibrate", "--out", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["plans"]) == 10
    assert all(plan["measured"] > 0 < plan["compute"] for plan in figures["plans"])
    local, read = ap.Cluster.local(2), ap.Cluster.load(path)
    assert read == local
    plain = ap.Cluster.local(2, measure=False)
    assert ap.Cluster.local(2, measure=False) == plain  # left out
    assert local.at(Pace(2.0, 3.0)).device.bandwidth == local.device.bandwidth / 2


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


def test_doctor_says_what_is_wrong_and_what_to_do(capsys, monkeypatch):
    from autopar.commands import doctor

    wrong = doctor.Check("gloo", False, "not in this torch", "install another")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: wrong,))
    assert main(["doctor", "--ranks", "1"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["WRONG", "gloo", "not", "in", "this", "torch"] in lines
    assert ["remedy:", "install", "another"] in lines


@pytest.fixture(scope="module")
def reports_of_ranks() -> list[tuple[list[float], demo.RankReport]]:
    """What the four processes of a demo return, started once for what is made of it."""
    return demo.launch(demo.train_in_parallel, demo.MESH.size, 4)


@pytest.fixture
def started_ranks(reports_of_ranks, monkeypatch) -> None:
    monkeypatch.setattr(demo, "launch", lambda *_, **__: reports_of_ranks)


@pytest.mark.usefixtures("started_ranks")
def test_demo_trains_on_four_processes_as_on_one(capsys):
    assert main(["demo", "--steps", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["parallel"]) == len(figures["single"]) == 4
    assert figures["difference"] < 1e-9
    assert figures["ok"]


def test_demo_fails_when_the_losses_differ(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "launch", lambda *_, **__: [([1.0], None)])
    monkeypatch.setattr(demo, "PAGE", tmp_path / "demo.html")
    assert main(["demo", "--steps", "1"]) == 1
    assert "DIFFER" in capsys.readouterr().out
    assert not (tmp_path / "demo.html").exists()


@pytest.mark.usefixtures("started_ranks")
def test_demo_ends_with_a_page_of_its_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "PAGE", tmp_path / "pages" / "demo.html")
    assert main(["demo", "--steps", "4"]) == 0
    page = (tmp_path / "pages" / "demo.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"to look at: {demo.PAGE}"
    assert "The largest difference from one process is" in page
    assert "Measured, in the last step" in page


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


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(ap.__version__)
