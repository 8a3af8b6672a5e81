"""Every example does what the command that its docstring gives tells Python or torchrun to do.

One of them is started by torchrun itself, the others in the environment that it gives.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
OPTIONS = {"python": 0, "torchrun": 2}  # words between a program and what it runs
BY_TORCHRUN = "gpt"


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


def by_torchrun(ranks: int, words: list[str]) -> tuple[str, str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*program, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    found = commands(path)
    assert found, "the docstring shows how to run it"
    for number, (ranks, words) in enumerate(found):
        if path.stem == BY_TORCHRUN:
            printed, errors = by_torchrun(ranks, words)
        else:
            (folder := tmp_path / str(number)).mkdir()
            environments = programs.torchrun(ranks) if ranks else [{}]
            printed, errors = programs.run(environments, words, ROOT, folder)
        assert printed.strip()
        assert "Warning" not in errors
