"""Programs of the README and of pages beside it run as shown and print what these show, the first
from an empty process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
PAGES = [README, *(page.read_text() for page in sorted(ROOT.glob("docs/*.md")))]
PROGRAMS = [(match[1], match[2]) for page in PAGES for match in PROGRAM.finditer(page)]


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_program_prints_what_is_shown(index, tmp_path):
    program, shown = PROGRAMS[index]
    (tmp_path / "example.py").write_text(program)
    if index == 0:
        command = [sys.executable, "-W", "error::UserWarning", "example.py"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        printed = result.stdout
    else:
        printed, _ = programs.run([{}], ["example.py"], tmp_path, tmp_path, strict=True)
    assert shown is not None, "a program is followed by what it prints"
    assert printed.strip() == shown.strip()


def test_commands_and_links_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert f"\n{target}:" in makefile
    for page in ("README.md", "ARCHITECTURE.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert link.startswith("http") or (ROOT / link).exists(), link
