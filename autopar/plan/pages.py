"""Pages: a plan as a file to look at in a browser."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import InvalidInput
from autopar.plan.value import PlanValue
from autopar.report.page import Asked, page
from autopar.report.training import Run, sections


def report(
    plan: PlanValue, path: str | Path, *, title: str | None = None, run: Run | None = None
) -> None:
    """Write one HTML file that needs nothing else: what was chosen, why, and what it costs; with a
    training run, how that went."""
    limit = plan.cluster.device.memory if plan.limit is None else plan.limit
    name = title or f"{type(plan.original.example.model).__name__} on {plan.whole_mesh}"
    asked = Asked(plan.mode, limit, plan.alternatives)
    text = page(name, plan, asked, [] if run is None else sections(run))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidInput(
            "the page of a plan can be written",
            got=f"{path}: {error.strerror}",
            remedy="give another path",
        ) from None
