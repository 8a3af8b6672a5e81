"""Every example runs by the command that its docstring gives."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def commands(path: Path) -> list[list[str]]:
    """The lines of the docstring that call a program."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    words = [shlex.split(line) for line in text.splitlines() if " examples/" in line]
    return [PROGRAMS[first] + rest for first, *rest in words if first in PROGRAMS]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path):
    found = commands(path)
    assert found, "the docstring shows how to run it"
    for command in found:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()
        assert "Warning" not in result.stderr
