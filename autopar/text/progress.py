"""Progress of long work: phases on a terminal, plain lines elsewhere if asked, or a callable.

with reporter(progress) as report:
    report("mesh", "1 of 3: Mesh(x=8); no pipeline; best so far 7.45 ms")

A report has a phase and a detail. `progress=None` shows them on a terminal only, True everywhere,
False nowhere; a callable receives them. Elsewhere than on a terminal one line a second is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, str], None]  # phase, detail
_PATIENCE = 0.5  # seconds before a terminal shows anything: short work stays silent
_SPINNER = 2  # columns in front of a line on a terminal
_EACH = 1.0  # seconds between lines elsewhere


@contextmanager
def reporter(progress: Report | bool | None) -> Iterator[Report]:
    """Yield a function that reports a phase and its detail in the way that `progress` asks for."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    is_forced = progress is True and sys.stderr is not None
    if not (callable(progress) or is_forced or (progress is None and terminal)):
        yield lambda phase, detail: None
    elif callable(progress):
        yield progress
    elif terminal:
        yield from _on_terminal()
    else:
        yield _in_lines()


def _in_lines() -> Report:
    """Return a report that prints lines, at most one a second."""
    last = -_EACH

    def report(phase: str, detail: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _EACH:
            last = now
            print(f"{phase}: {detail}", file=sys.stderr, flush=True)

    return report


def fit_line(line: str, width: int) -> str:
    """Shorten a line to `width`: first by its middle parts, then by the end of its first part.

    Parts are separated by `; `. The last one, such as the best plan so far, always stays.
    """
    first, *middle = line.split("; ")
    last = f"; {middle.pop()}" if middle else ""
    while middle and len("; ".join([first, *middle])) + len(last) > width:
        middle.pop()
    left = "; ".join([first, *middle])
    if len(left) + len(last) <= width:
        return left + last
    room = width - len(last) - 1
    return f"{left[:room]}…{last}" if room > 0 else f"{line[: max(width - 1, 0)]}…"


def _on_terminal() -> Iterator[Report]:
    """Yield a report that shows one changing line on a terminal, and removes it at the end."""
    from rich.console import Console
    from rich.text import Text

    console, started = Console(stderr=True), time.monotonic()
    with console.status("planning") as status:

        def report(phase: str, detail: str) -> None:
            if time.monotonic() - started > _PATIENCE:
                line = fit_line(f"{phase}: {detail}", console.width - _SPINNER)
                status.update(Text(line, no_wrap=True))  # names are no markup

        yield report
