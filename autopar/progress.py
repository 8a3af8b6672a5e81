"""Progress of long work: phases on a terminal, plain lines elsewhere if asked, or a callable.

with reporter(progress) as report:
    report("mesh", "1 of 3: Mesh(x=8)")          # phase, detail

`progress`: None shows phases on a terminal only, True everywhere, False nowhere; a callable is
told.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, str], None]  # phase, detail
_PATIENCE = 0.5  # seconds before a terminal shows anything: short work stays silent


@contextmanager
def reporter(progress: Report | bool | None) -> Iterator[Report]:
    """What tells of each phase, in the way that `progress` asks for."""
    terminal = sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        yield lambda phase, detail: None
    elif callable(progress):
        yield progress
    elif terminal:
        yield from _on_terminal()
    else:
        yield lambda phase, detail: print(f"{phase}: {detail}", file=sys.stderr, flush=True)


def _on_terminal() -> Iterator[Report]:
    """One line that changes and leaves nothing behind."""
    from rich.console import Console

    console, started = Console(stderr=True), time.monotonic()
    with console.status("planning") as status:

        def report(phase: str, detail: str) -> None:
            if time.monotonic() - started > _PATIENCE:
                status.update(f"{phase}: {detail}")

        yield report
