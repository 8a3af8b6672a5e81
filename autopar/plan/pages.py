"""Pages: a plan as a file to look at, in a browser or as a trace."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import InvalidInput
from autopar.plan.value import PlanValue
from autopar.report.page import Asked, page
from autopar.report.trace import events_of, write
from autopar.report.training import Run, sections


def report(
    plan: PlanValue, path: str | Path, *, title: str | None = None, run: Run | None = None
) -> None:
    """Write one HTML file that needs nothing else: what was chosen, why, and what it costs; with a
    training run, how that went."""
    limit = plan.cluster.device.memory if plan.limit is None else plan.limit
    name = title or f"{type(plan.original.example.model).__name__} on {plan.whole_mesh}"
    asked = Asked(plan.mode, limit, plan.alternatives)
    text = page(name, plan, asked, [] if run is None else sections(run, plan))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidInput(
            "the page of a plan can be written",
            got=f"{path}: {error.strerror}",
            remedy="give another path",
        ) from None


def trace(plan: PlanValue, path: str | Path) -> None:
    """Write the predicted step as a trace for Chrome or Perfetto, packed where `path` ends with
    `.gz`: actions of each rank, calls with their movements, sums of gradients."""
    write(path, events_of(plan), "simulated")
