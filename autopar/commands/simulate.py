"""The command `autopar simulate`: price and draw a schedule without any device."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.commands.parsers import COSTS, NARROWEST, schedule_options
from autopar.commands.printing import columns, show_json
from autopar.commands.streams import to_results
from autopar.errors import InvalidInput
from autopar.pipeline.notation import load
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import NAMES, option_names, schedule
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.timeline import Timeline, draw
from autopar.text.units import counted

SIZES = ("stages", "microbatches")
PATH = ("forwards", "backwards", "weights", "messages")  # the figures of the critical path


def run(args: argparse.Namespace) -> int:
    """Print the figures and the drawing of a schedule, or its figures as JSON."""
    chosen = make_schedule(args)
    if args.width is not None and args.width < 1:
        raise InvalidInput("a drawing has columns", got="--width", remedy="--width 100")
    timeline = simulate(
        chosen,
        args.forward,
        args.backward,
        backward_weight=args.backward_weight,
        latency=args.latency,
        sync=args.sync,
        sync_cost=args.sync_cost,
    )
    if args.json:
        show_json(figures(timeline))
    else:
        to_results(draw(timeline, args.width or max(columns(), NARROWEST)))
        to_results(_summary(timeline))
    return 0


def make_schedule(args: argparse.Namespace) -> Schedule:
    """Return the schedule that the arguments name."""
    options = {
        name: getattr(args, name) for name in schedule_options() if getattr(args, name) is not None
    }
    if args.schedule not in NAMES and args.schedule.endswith((".txt", ".csv")):
        options |= {name: size for name in SIZES if (size := getattr(args, name)) is not None}
        if options:
            raise InvalidInput(
                "a schedule file has its own sizes and options",
                got=" ".join(f"--{name}" for name in options),
                remedy="leave them out, or name a schedule instead of a file",
            )
        return load(args.schedule)
    if args.schedule in NAMES:
        for name in SIZES:
            if getattr(args, name) is None:
                raise InvalidInput(
                    "a schedule is made for a number of stages and of micro-batches",
                    got=f"no --{name}",
                    remedy=f"add --{name} 8",
                )
        options |= {
            name: getattr(args, name) for name in COSTS if name in option_names(args.schedule)
        }
    # `schedule()` refuses an unknown name.
    sizes = {name: 1 if (n := getattr(args, name)) is None else n for name in SIZES}
    return schedule(args.schedule, **sizes, **options)


def figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures that `--json` prints."""
    simulated = timeline.schedule
    path = timeline.critical_path
    data = {
        "schedule": simulated.name,
        "stages": simulated.ranks,
        "microbatches": simulated.microbatches,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "idle": list(timeline.idle),
        "peak_activations": list(timeline.peak_activations),
        "weights": simulated.pipes,
        "weight_versions": list(timeline.weight_versions),
        "critical_path": {name: getattr(path, name) for name in PATH},
    }
    if timeline.synchronizations:
        data |= {"uncovered_sync": timeline.uncovered_sync, "step_time": timeline.step_time}
    return data


def _summary(timeline: Timeline) -> str:
    path = timeline.critical_path
    split = f" + {path.weights} W" if path.weights else ""
    lines = [
        f"weights           {counted(timeline.schedule.pipes, 'copy')} of each stage",
        f"weight versions   {' '.join(map(str, timeline.weight_versions))}",
        f"peak activations  {' '.join(f'{peak:g}' for peak in timeline.peak_activations)}",
        f"idle              {' '.join(f'{idle:g}' for idle in timeline.idle)}",
        f"critical path     {path.forwards} F + {path.backwards} B{split}, "
        f"{counted(path.messages, 'message')}",
    ]
    if timeline.synchronizations:
        lines.append(
            f"synchronisation   {timeline.uncovered_sync:g} uncovered, "
            f"step time {timeline.step_time:g}"
        )
    return "\n".join(lines)
