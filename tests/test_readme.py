"""Programs of the README and of docs/ run as shown and print what these show, the first from an
empty process, and so do commands with what they print; others are read as they are written, links
lead somewhere, and the reference is made of docstrings."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import autopar as ap
from autopar.commands.parsers import make_parser
from autopar.planner.rules import RULES
from tests import documents, programs
from tests.documents import LINKED, PAGES, ROOT, Block, Program

RUN = [page for page in PAGES if documents.runs(page.read_text())[1]]
NEXT = "----- the next block"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("page", RUN, ids=named)
def test_page_prints_what_it_shows(page, tmp_path):
    files, order = documents.runs(page.read_text())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for number, run in enumerate(order):
        if isinstance(run, Block):
            check(page, run, "".join(command(line, tmp_path) for line in run.lines))
        else:
            printed = program(run, tmp_path, alone=page == PAGES[0] and number == 0)
            for block, part in zip(run, printed.split(NEXT + "\n"), strict=True):
                check(page, block, part)


def check(page: Path, block: Block, printed: str) -> None:
    where, shown = f"{named(page)}, line {block.line}", block.shown or ""
    assert documents.is_shown(printed, shown), f"{where}:\n{printed}\nis not\n{shown}"


def program(blocks: Program, folder: Path, alone: bool) -> str:
    """What the blocks print, one after the other, in one process."""
    (folder / "example.py").write_text(f"\nprint({NEXT!r})\n".join(b.text for b in blocks))
    if not alone:
        return programs.run([{}], ["example.py"], folder, folder, strict=True)[0]
    words = [sys.executable, "-W", "error::UserWarning", "example.py"]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def command(line: str, folder: Path) -> str:
    """What a line of a shell prints."""
    first, *words = shlex.split(line)
    environments = [{}]
    if first == "torchrun":
        option, ranks, *words = words
        assert option == "--nproc-per-node", line
        environments = programs.torchrun(int(ranks))
    elif first == "autopar":
        words = ["-m", "autopar.cli", *words]
    else:
        assert first == "python", line
    return programs.run(environments, words, folder, folder, strict=True)[0]


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"(?m)(?:^|`)make (\w+)", page.read_text()):
            assert f"\n{target}:" in makefile, target


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_lead_somewhere(page):
    for link in documents.links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        # A source distribution has no links to the rooms.
        is_link = not {"passes", "strategies"}.isdisjoint(Path(path).parts)
        assert target.exists() or (is_link and (ROOT / "PKG-INFO").exists()), link
        assert not anchor or anchor in documents.anchors(target.read_text()), link


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[1:]:
        if page.name != "index.md":
            assert f"]({page.relative_to(ROOT / 'docs')})" in index, page


def test_commands_are_read_as_they_are_written():
    found = 0
    for page in PAGES:
        for block in documents.blocks(page.read_text()):
            for line in block.lines if block.language == "console" else ():
                words = shlex.split(line.partition(" >")[0], comments=True)
                if words[:1] == ["autopar"]:
                    assert make_parser("", "").parse_args(words[1:]).command == words[1]
                    found += 1
    assert found > 20


def test_the_reference_of_commands_is_what_their_parsers_say():
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make_reference.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.PAGE.read_text() == make.page(), "make docs"


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "functions.md").read_text()
    listed = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith(":::")}
    assert {*ap.__all__, *ap.nn.__all__} - listed == {"nn"}


def test_every_argument_of_the_doors_is_described():
    for function in (ap.plan, ap.parallelize, ap.shard):
        described = re.findall(r"^    (\w+): ", inspect.getdoc(function), re.MULTILINE)
        assert described == [*inspect.signature(function).parameters]


def test_the_site_has_every_page_in_its_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f"- {page.relative_to(ROOT / 'docs')}\n" in navigation, page


def test_the_table_of_laws_names_files_that_exist():
    table = (ROOT / "tests" / "README.md").read_text()
    for name in re.findall(r"`([\w/]+\.py)`", table):
        assert (ROOT / "tests" / name).exists() or (ROOT / name).exists(), name


def test_the_rules_of_the_planner_are_explained_as_they_stand():
    page = (ROOT / "docs" / "concepts" / "search.md").read_text()
    rows = page.partition("| rule | reason |\n|---|---|\n")[2].partition("\n\n")[0]
    assert rows.splitlines() == [f"| {rule.name} | {rule.reason} |" for rule in RULES]
