"""Printing: pages and tables, in colours and boxes on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autopar.units import table


def show(page: object) -> None:
    """A text as it is, numbers in colour on a terminal."""
    if not sys.stdout.isatty():
        print(page)
        return
    from rich.console import Console

    Console().print(str(page), markup=False, soft_wrap=True)


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of cells, the first of them the headings."""
    if not sys.stdout.isatty():
        print(*table(rows), sep="\n")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    made = Table(*map(escape, rows[0]), header_style="bold")
    for row in rows[1:]:
        made.add_row(*map(escape, row))
    Console().print(made)
