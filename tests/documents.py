"""Pages of documentation: their blocks of code with what these print, their links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG"))]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n(\n(?=```text\n))?", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/]+\.\w+)\n")
_IMPORT = re.compile(r"^import autopar\b", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code, and what is shown of what it prints."""

    language: str
    text: str
    line: int
    shown: str | None = None

    @property
    def file(self) -> str | None:
        """The name of the file that it is the content of, which its first line says."""
        found = _FILE.match(self.text)
        return found[1] if found else None

    @property
    def lines(self) -> list[str]:
        """Of a shell: one goes on where it ends in a backslash."""
        return self.text.replace("\\\n", "").splitlines()

    @property
    def imports(self) -> bool:
        return bool(_IMPORT.search(self.text))


def blocks(page: str) -> Iterator[Block]:
    """A text block right behind another is what that one prints."""
    found = list(_FENCED.finditer(page))
    for index, match in enumerate(found):
        is_shown = index and found[index - 1][3] is not None
        if not is_shown:
            shown = found[index + 1][2] if match[3] is not None else None
            yield Block(match[1], match[2], page[: match.start()].count("\n") + 1, shown)


Program = list[Block]  # python, of one namespace


def runs(page: str) -> tuple[dict[str, str], list[Program | Block]]:
    """The files of a page; and its programs and the commands with what they print, in order.

    A block that imports autopar begins a program, and those after it go on with it."""
    files: dict[str, str] = {}
    order: list[Program | Block] = []
    program: Program = []
    for block in blocks(page):
        if block.language == "console" and block.shown is not None:
            order.append(block)
        elif block.language == "python" and block.file:
            files[block.file] = block.text
        elif block.language == "python":
            if block.imports or not program:
                order.append(program := [])
            program.append(block)
    return files, order


def is_shown(printed: str, shown: str) -> bool:
    """A line `...` of what is shown stands for any lines."""
    wanted = [
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + "\n"
        for line in shown.strip("\n").split("\n")
    ]
    given = "".join(line.rstrip() + "\n" for line in printed.strip("\n").split("\n"))
    return re.fullmatch("".join(wanted), given) is not None


def links(page: str) -> list[str]:
    """Where a page leads, but to other sites; of pictures, too."""
    text = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page))
    return [link for link in _LINK.findall(text) if not link.startswith("http")]


def anchors(page: str) -> set[str]:
    """What links may name of a page: its headings, as they are spelled there."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = (f"{name}-{number}" for number in range(1, 100))
        found.add(next(one for one in (name, *again) if one not in found))
    return found
