"""The automatic choice beside what experts would write down: a JSON line per case of a real size.

    python -m benchmarks.choices [mixtral llama-3-70b ...] [--keep templates.jsonl]
        [--templates-only | --auto-only] [--seconds 10] [--long] > choices.jsonl
    python -m benchmarks.choices --table choices.jsonl     # for the documentation

A name stands for all cases that begin with it. Cases are in `benchmarks/choice_cases.py`, each with
at least 25 templates, which are planned by name. `ratio` is the predicted step of the choice over
that of the best template that fits; above 1.01 the planner has missed something that an expert
knows. With `--long`, `long_ratio` is the choice over one that had 300 CPU seconds.

Templates take hours, and change with prices alone: `--keep` appends each to a file and does not
plan again what is there, so that after a change of the planner `--auto-only` is enough. Templates
and choices run in processes of their own, so that `peak_gigabytes` and CPU seconds are theirs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import autopar as ap
from autopar import planning
from autopar.candidates.patience import SECONDS
from autopar.capture import capture
from benchmarks.choice_cases import CASES, ChoiceCase
from benchmarks.choice_templates import Template
from benchmarks.whole_plans import warm_up

PRECISION = ap.Precision(compute=torch.bfloat16)
TEMPLATE_SECONDS = 20.0  # CPU seconds of each template: twice those of a whole choice
LONG_SECONDS = 300.0
LONGEST_REASON = 400  # characters
Line = dict[str, Any]
COLUMNS = {
    "case": "case",
    "seconds": "choice, s",
    "template_seconds": "best template, s",
    "ratio": "ratio",
    "template": "best template",
    "choice": "chosen",
    "choice_cpu_seconds": "CPU s",
    "peak_gigabytes": "peak GB",
    "long_ratio": "over 300 s",
}


def choose(case: ChoiceCase, seconds: float) -> Line:
    """Return what the planner chooses, with the CPU seconds that capture and choice took."""
    warm_up()
    built = case.build()
    captured_after = 0.0

    def timed_capture(*call: Any) -> Any:
        nonlocal captured_after
        captured = capture(*call)
        captured_after = time.process_time() - started
        return captured

    line: Line = {"limit": seconds}
    started = time.process_time()
    with patch.object(planning, "capture", timed_capture):
        try:
            plan = _plan(built, case.machines(), seconds=seconds)
        except ap.AutoparError as error:
            line["refused"] = _reason(error)
        else:
            line |= {
                "choice": plan.alternative(plan.limit or 0.0).how,
                "seconds": plan.seconds,
                "gigabytes": round(plan.memory.peak / 1e9, 2),
                "ended_early": plan.search is not None and plan.search.interrupted,
            }
    ended = time.process_time() - started
    line["capture_cpu_seconds"] = round(captured_after, 1)
    line["choice_cpu_seconds"] = round(ended - captured_after, 1)
    line["peak_gigabytes"] = round(_peak() / 1e9, 2)
    return line


def plan_templates(case: ChoiceCase, templates: list[Template], keep: Path | None) -> list[Line]:
    """Plan each template by name from one capture; append each result to `keep` as it comes."""
    warm_up()
    built = case.build()
    captured = capture(built.model, built.args, built.kwargs, PRECISION)
    lines: list[Line] = []
    with patch.object(planning, "capture", lambda *_: captured):
        for template in templates:
            line: Line = {"case": case.name, "template": template.name}
            lines.append(line | _by_name(built, case.machines(), template))
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    return lines


def _by_name(built: Any, machines: ap.Cluster, template: Template) -> Line:
    """Return the step of one template, or why there is none."""
    started = time.process_time()
    try:
        used = machines.first(template.mesh.size)  # experts leave slow nodes out, the last ones
        plan = _plan(built, used, seconds=TEMPLATE_SECONDS, **template.options())
    except Exception as error:
        line: Line = {"refused": _reason(error)}
    else:
        line = {"seconds": plan.seconds, "gigabytes": round(plan.memory.peak / 1e9, 2)}
    return {
        **line,
        "cpu_seconds": round(time.process_time() - started, 1),
        "peak_gigabytes": round(_peak() / 1e9, 2),
    }


def _reason(error: Exception) -> str:
    """Return what an error says, with its kind where that is not one of ours."""
    kind = "" if isinstance(error, ap.AutoparError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:LONGEST_REASON]


def _plan(built: Any, machines: ap.Cluster, **options: Any) -> ap.Plan:
    return ap.plan(
        built.model, built.args, built.kwargs, cluster=machines, precision=PRECISION, **options
    )


def _peak() -> int:
    """Return the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(case: ChoiceCase, templates: Mapping[str, Line], chosen: Line) -> Line:
    """Return the line of a case: the choice beside the best of its templates."""
    planned = {name: line for name, line in templates.items() if "seconds" in line}
    line: Line = {
        "case": case.name,
        **chosen,
        "planned": len(planned),
        "templates_refused": len(templates) - len(planned),
        "not_measured": len(case.templates) - len(templates),
    }
    if planned:
        best = min(planned, key=lambda name: planned[name]["seconds"])
        line |= {"template": best, "template_seconds": planned[best]["seconds"]}
    if planned and "seconds" in chosen:
        line["ratio"] = chosen["seconds"] / line["template_seconds"]
    return line


def summary(lines: list[Line]) -> Line:
    """Return the figures of all cases: what has to be 1.01 at most, and below 1 in the median."""
    ratios = {line["case"]: line["ratio"] for line in lines if "ratio" in line}
    long_ratios = [line["long_ratio"] for line in lines if "long_ratio" in line]
    return {
        "cases": len(lines),
        "without_ratio": [line["case"] for line in lines if line["case"] not in ratios],
        "median_ratio": statistics.median(ratios.values()) if ratios else None,
        "largest_ratio": max(ratios.values(), default=None),
        "slower_than_template": [name for name, ratio in ratios.items() if ratio > 1.01],
        "largest_long_ratio": max(long_ratios, default=None),
        "late": [line["case"] for line in lines if _is_late(line)],
        "peak_gigabytes": max((line["peak_gigabytes"] for line in lines), default=None),
    }


def _is_late(line: Line) -> bool:
    return bool(line["choice_cpu_seconds"] > 1.1 * line["limit"])


def table(lines: list[Line]) -> str:
    """Return the lines of all cases as a table in Markdown."""
    rows = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for line in lines:
        words = CASES[line["case"]].words
        rows.append([_cell({**line, "case": words}.get(column)) for column in COLUMNS])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def read_lines(path: Path | None) -> list[Line]:
    """Read JSON lines; a file that is not there has none."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def measure(case: ChoiceCase, arguments: argparse.Namespace) -> Line | None:
    """Measure what is asked for of one case; None where templates alone are."""
    kept = {
        line["template"]: line for line in read_lines(arguments.keep) if line["case"] == case.name
    }
    missing = [template for template in case.templates if template.name not in kept]
    if missing and not arguments.auto_only:
        lines = _in_own_process(plan_templates, case.name, missing, arguments.keep)
        kept |= {line["template"]: line for line in lines}
    if arguments.templates_only:
        return None
    known = {one.name: kept[one.name] for one in case.templates if one.name in kept}
    line = compare(case, known, _in_own_process(choose, case.name, arguments.seconds))
    if arguments.long and "seconds" in line:
        longer = _in_own_process(choose, case.name, LONG_SECONDS)
        line |= {
            "long_choice": longer.get("choice"),
            "long_seconds": longer["seconds"],
            "long_ratio": line["seconds"] / longer["seconds"],
        }
    return line


def _in_own_process(work: Callable[..., Any], name: str, *rest: Any) -> Any:
    """Return what `work` makes of a case in a process whose memory and caches no other has."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, warnings.simplefilter, ("ignore",)) as pool:
        return pool.submit(_of_case, work, name, *rest).result()


def _of_case(work: Callable[..., Any], name: str, *rest: Any) -> Any:
    return work(CASES[name], *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="how their names begin; all if none is given")
    parser.add_argument("--keep", type=Path, help="JSON lines of templates, added to and reused")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds of the choice")
    parser.add_argument("--long", action="store_true", help="choose again in 300 CPU seconds")
    parser.add_argument("--table", type=Path, help="print earlier output as a table, and no more")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--auto-only", action="store_true", help="templates are those of --keep")
    only.add_argument("--templates-only", action="store_true", help="fill the file of --keep")
    arguments = parser.parse_args()
    if arguments.table:
        print(table([line for line in read_lines(arguments.table) if "limit" in line]))
        return
    begun = tuple(arguments.cases) or ("",)
    lines: list[Line] = []
    for name, case in CASES.items():
        if name.startswith(begun) and (line := measure(case, arguments)):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if lines:
        print(json.dumps(summary(lines)))


if __name__ == "__main__":
    main()
