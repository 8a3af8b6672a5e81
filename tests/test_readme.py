"""Programs of the README and of docs/ run as shown and print what these show, the first from an
empty process; commands are read as they are written, links lead somewhere, and the reference is
made of docstrings."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.commands import make_parser
from tests import programs

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROGRAMS = [(match[1], match[2]) for page in PAGES for match in PROGRAM.finditer(page.read_text())]
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG"))]
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


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


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"(?m)(?:^|`)make (\w+)", page.read_text()):
            assert f"\n{target}:" in makefile, target


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as they are made by those who show it."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        is_link = target.name in ("passes", "strategies")  # a source distribution has none
        assert target.exists() or (is_link and (ROOT / "PKG-INFO").exists()), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[1:]:
        if page.name != "index.md":
            assert f"]({page.relative_to(ROOT / 'docs')})" in index, page


def test_commands_are_read_as_they_are_written():
    found = 0
    for page in PAGES:
        for block in CONSOLE.findall(page.read_text()):
            for line in block.splitlines():
                words = shlex.split(line.partition(" >")[0], comments=True)
                if words[:1] == ["autopar"]:
                    assert make_parser("", "").parse_args(words[1:]).command == words[1]
                    found += 1
    assert found > 20


def test_the_reference_is_what_docstrings_say():
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make_reference.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for name, text in make.pages().items():
        assert (make.FOLDER / name).read_text() == text, "make docs"
