"""Hooks of the documentation site: pages and files outside docs/ become part of it.

A page may link to `../ARCHITECTURE.md` or `../../examples/gpt.py`, which works where the repository
is read. On the site the pages at the top of the repository lie beside docs/index.md, and files of
code under `source/`. Links of every page are rewritten accordingly.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TOP_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"\]\((?!https?:)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages at the top of the repository, and every file of code that a page links to."""
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    linked = {
        _target(page.src_uri, match[1])
        for page in files.documentation_pages()
        for match in _LINK.finditer(page.content_string)
    }
    for target in sorted(linked):
        if _place(target) != target and target not in TOP_PAGES and not target.startswith("docs/"):
            files.append(File.generated(config, _place(target), content=_text(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points each link to where its target is on the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        place = os.path.relpath(_place(_target(page.file.src_uri, match[1])), folder)
        return f"]({place}{match[2] or ''})"

    return _LINK.sub(rewritten, markdown)


def _target(page: str, link: str) -> str:
    """Returns the path of what a page links to, from the root of the repository."""
    folder = ROOT if page in TOP_PAGES else ROOT / "docs" / PurePosixPath(page).parent
    return os.path.relpath(folder / link, ROOT)


def _place(target: str) -> str:
    """Returns where a file of the repository is on the site."""
    if target in TOP_PAGES:
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}.txt"


def _text(path: Path) -> str:
    """Returns the text of a file, or the names in a folder."""
    if path.is_dir():
        return "\n".join(sorted(entry.name for entry in path.iterdir()))
    return path.read_text()
