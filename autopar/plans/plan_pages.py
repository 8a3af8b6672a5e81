"""Pages: a plan as a file to look at, in a browser or as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.base.files import write_file
from autopar.errors import require_ending
from autopar.plans.plan_value import PlanValue
from autopar.plans.saved_value import digest
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
    """Write one HTML file that needs nothing else: the decisions, their reasons and their costs.

    Args:
        path: The file, with or without folders that do not exist yet.
        title: Its heading. None: the class of the model and the mesh.
        run: Measured steps, shown
            beside the predicted ones: `pm.record(steps)` once they are made, or a list of what
            `pm.on_step` was called with.
    """
    limit = plan.cluster.device.usable_memory if plan.limit is None else plan.limit
    name = title or f"{type(plan.original.example.model).__name__} on {plan.whole_mesh}"
    context = PageContext(plan.mode, limit, plan.alternatives, plan.left_out, plan.trials)
    measured = None if run is None else read_run(run, plan.seconds)
    write_file(path, page(name, plan, context, measured), "the page of a plan")


def draw(plan: PlanValue, path: str | Path) -> None:
    """Write the program as a picture: calls in order, equal blocks once, values and movements.

    Args:
        path: An SVG file.
    """
    require_ending(path, ".svg", "the picture of a plan")
    what = f"{type(plan.original.example.model).__name__} on {plan.whole_mesh}"
    picture = draw_program(program_blocks(plan, module_tree(plan)), what)
    write_file(path, picture.file(), "the picture of a plan")


def trace(plan: PlanValue, path: str | Path) -> None:
    """Write the predicted step as a trace for Chrome or Perfetto.

    It holds the actions of each rank, calls with their movements, and sums of gradients.

    Args:
        path: A JSON file, which is packed if its name ends with `.gz`.
    """
    write(path, Trace("simulated", digest(plan), tuple(events_of(plan))))
