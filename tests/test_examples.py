"""Every example does what the command that its docstring gives tells Python or torchrun to do.

They start in the environment that torchrun gives; the elastic one by torchrun itself, which starts
its ranks again when one is killed.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import elastic
from tests import programs
from tests.distributed import lost

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
OPTIONS = {"python": 0, "torchrun": 2}  # words between a program and what it runs
FOLDER = "run/"  # that an example writes into begins with it


def commands(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of the docstring that call a program: its number of ranks, and what they run."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = []
    for program, *rest in (shlex.split(line) for line in text.splitlines() if " examples/" in line):
        if program in OPTIONS:
            options, words = rest[: OPTIONS[program]], rest[OPTIONS[program] :]
            assert not options or options[0] == "--nproc-per-node"
            found.append((int(options[1]) if options else 0, words))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    found = commands(path)
    assert found, "the docstring shows how to run it"
    for number, (ranks, words) in enumerate(found):
        (folder := tmp_path / str(number)).mkdir()
        words = [str(folder / word) if word.startswith(FOLDER) else word for word in words]
        environments = programs.torchrun(ranks) if ranks else [{}]
        printed, errors = programs.run(environments, words, ROOT, folder)
        assert printed.strip()
        assert "Warning" not in errors


def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    killed = subprocess.run(
        [*torchrun, "--max-restarts", "1", "-m", "tests.distributed.lost", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert killed.returncode == 0, killed.stderr
    lives = [line for line in killed.stdout.splitlines() if "ranks from" in line]
    first = int(lives[-1].split()[-1])
    assert lives == ["2 ranks from step 0", f"2 ranks from step {first}"]
    assert 0 < first <= lost.LAST
    loss = elastic.train(tmp_path / "alone")
    assert killed.stdout.splitlines()[-1] == f"step {elastic.STEPS}: loss {loss.item():.6f}"
