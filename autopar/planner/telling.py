"""Telling: what people see of the search for a plan: what is looked at, and the best so far.

report = Telling(report, ledger)
report.look_at(size_words(2, 4))        # plan: 2 stages, 4 micro-batches; best so far 7.45 ms
report("mesh", "1 of 3: Mesh(x=8)")     # mesh: 1 of 3: Mesh(x=8); 2 stages, 4 micro-batches; ...
"""

from __future__ import annotations

from autopar.planner.ledger import Ledger
from autopar.text.progress import Report
from autopar.text.units import counted, seconds_text


def size_words(stages: int, microbatches: int) -> str:
    """`2 stages, 4 micro-batches`."""
    pipeline = "no pipeline" if stages == 1 else counted(stages, "stage")
    batches = "" if microbatches == 1 else f", {counted(microbatches, 'micro-batch')}"
    return f"{pipeline}{batches}"


class Telling:
    """Tells of each phase beside what is looked at; no phase begins when the time is over."""

    def __init__(self, report: Report, ledger: Ledger) -> None:
        self._report, self._ledger, self._size = report, ledger, ""

    def look_at(self, size: str) -> None:
        """From now on."""
        self._size = ""
        self("plan", size)
        self._size = size

    def __call__(self, phase: str, detail: str) -> None:
        self._ledger.go_on()
        found = self._ledger.kept.found
        best = f"best so far {seconds_text(found[0].figures.seconds)}" if found else ""
        self._report(phase, "; ".join(filter(None, (detail, self._size, best))))
