"""Pages: a plan as a file to look at, in a browser or as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.base.files import write_file
from autopar.errors import require_ending
from autopar.plan.plan_value import PlanValue
from autopar.plan.saved_value import digest
from autopar.report.module_tree import module_tree
from autopar.report.page import PageContext, page
from autopar.report.program_lanes import draw_program, program_blocks
from autopar.report.run_charts import RecordedSteps, StepFiguresLike, TrainingRun, read_run
from autopar.report.trace import Trace, events_of, write


def report(
    plan: PlanValue,
    path: str | Path,
    *,
    title: str | None = None,
    run: TrainingRun | RecordedSteps | Sequence[StepFiguresLike] | None = None,
) -> None:
    """Write one HTML file that needs nothing else: what was chosen, why, and what it costs; with a
    run, how that went: `pm.record(steps)`, once they are made, or a list of what `pm.on_step` told.
    """
    limit = plan.cluster.device.memory if plan.limit is None else plan.limit
    name = title or f"{type(plan.original.example.model).__name__} on {plan.whole_mesh}"
    context = PageContext(plan.mode, limit, plan.alternatives, plan.left_out, plan.trials)
    measured = None if run is None else read_run(run, plan.seconds)
    write_file(path, page(name, plan, context, measured), "the page of a plan")


def draw(plan: PlanValue, path: str | Path) -> None:
    """Write the program as a picture, an SVG file: calls in order, equal blocks once, with the ways
    of their values, and movements where they stand."""
    require_ending(path, ".svg", "the picture of a plan")
    what = f"{type(plan.original.example.model).__name__} on {plan.whole_mesh}"
    picture = draw_program(program_blocks(plan, module_tree(plan)), what)
    write_file(path, picture.file(), "the picture of a plan")


def trace(plan: PlanValue, path: str | Path) -> None:
    """Write the predicted step as a trace for Chrome or Perfetto, packed where `path` ends with
    `.gz`: actions of each rank, calls with their movements, sums of gradients."""
    write(path, Trace("simulated", digest(plan), tuple(events_of(plan))))
