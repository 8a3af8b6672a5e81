"""Printing what a command found: pages and tables, in colours and boxes on a terminal, plain
elsewhere; figures as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from autopar.base.schema import json_text
from autopar.commands.streams import results, to_results
from autopar.text.tables import table


def show(page: object) -> None:
    """A text as it is, numbers in colour on a terminal."""
    if not results().isatty():
        to_results(str(page))
        return
    from rich.console import Console

    Console(file=results()).print(str(page), markup=False, soft_wrap=True)


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of cells, the first of them the headings."""
    if not results().isatty():
        to_results("\n".join(table(rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(header_style="bold")
    for heading in rows[0]:
        made.add_column(Text(heading))
    for row in rows[1:]:
        made.add_row(*map(Text, row))
    Console(file=results()).print(made)


def show_json(figures: Any) -> None:
    """Figures for programs."""
    to_results(json_text(figures))


def columns() -> int:
    """How wide a drawing may be."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    shown = results()
    return (os.get_terminal_size(shown.fileno()).columns if shown.isatty() else 0) or 80
