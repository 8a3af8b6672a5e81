"""Printing of a command's results: pages, tables and JSON; coloured on a terminal alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from autopar.base.schema import json_text
from autopar.commands.streams import results, to_results
from autopar.text.tables import table


def show(page: object) -> None:
    """Print a text as it is, with numbers in colour on a terminal."""
    if not results().isatty():
        to_results(str(page))
        return
    from rich.console import Console

    Console(file=results()).print(str(page), markup=False, soft_wrap=True)


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, the first of them the headings."""
    if not results().isatty():
        to_results("\n".join(table(rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(header_style="bold")
    for heading in rows[0]:
        grid.add_column(Text(heading))
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    Console(file=results()).print(grid)


def show_json(figures: Any) -> None:
    """Print figures as JSON, for programs."""
    to_results(json_text(figures))


def columns() -> int:
    """Return the columns that a drawing may take."""
    variable = os.environ.get("COLUMNS", "")
    if variable.isdecimal() and int(variable):
        return int(variable)
    shown = results()
    return (os.get_terminal_size(shown.fileno()).columns if shown.isatty() else 0) or 80
