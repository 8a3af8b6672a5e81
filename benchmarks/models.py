"""Models: families of transformers and nets of our own, captured, planned and compared.

    python -m benchmarks.models --only 'bert|llama' --workers 2
    python -m benchmarks.models --capture          # only whether they are captured: minutes for all
    python -m benchmarks.models --part 2/8 > 2     # every eighth, from the second
    python -m benchmarks.models --join 1 2 3       # what was printed, as one table with its figures

Prints a line of JSON for each family: whether it is captured (if not, the reason and the line), how
long an automatic plan takes and how near its bound it is, what of the predicted time is spent in
operators that run whole on every rank for want of a rule, and whether the parallel program trains
as one device does, dropout included (`autopar.verify`), on dp=2, tp=2 and, where blocks repeat, on
pp=2, dp=2. At the end the figures. Each family has a process and a time limit of its own. Models
are tiny (`benchmarks/families.py`), and so are the machines: as weak beside them as real ones
beside real models.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar as ap
from autopar.capture import capture
from autopar.cluster.cluster import Cluster
from autopar.cluster.machines import Device, Link, Node
from benchmarks import families, nets
from benchmarks.processes import Line, lines_of

WEAK = Device("weak", {"f32": 1e9}, memory=8e9, bandwidth=1e9, overhead=1e-7)
MACHINES = Cluster((Node(WEAK, 4, Link(alpha=1e-7, bandwidth=1e9)),), Link(1e-7, 1e9), "weak")
MESHES = {"dp2tp2": ap.Mesh(dp=2, tp=2), "pp2dp2": ap.Mesh(pp=2, dp=2)}
TARGET = 0.05  # of the predicted time, in operators without a rule
STEPS = 2

Model = tuple[nn.Module, dict[str, Any]]


def cases() -> dict[str, Callable[[], Model]]:
    """All models by their names: how each is built, with a batch."""
    made = {name: partial(families.build, name) for name in families.names()}
    return {**made, **nets.NETS}


def measure(build: Callable[[], Model], only_capture: bool, parity: bool) -> Iterator[Line]:
    """What is known of one model, each time that more of it is."""
    line: Line = {"stage": "build"}
    try:
        model, inputs = build()
        line["parameters"] = sum(p.numel() for p in model.parameters())
        model(**inputs).backward()
        model.zero_grad()
        line["stage"], started = "capture", time.perf_counter()
        captured = capture(model, (), inputs)
        line["capture_seconds"] = round(time.perf_counter() - started, 2)
        line["operators"] = len(list(captured.operators))
        if only_capture:
            line["stage"] = "done"
        yield line
        for name, mesh in {} if only_capture else MESHES.items():
            line["stage"] = f"plan {name}"
            plan, line[name] = _planned(model, inputs, mesh)
            yield line
            if plan is not None and parity:
                line["stage"] = f"verify {name}"
                line[name] |= _verified(model, inputs, plan)
                yield line
        line["stage"] = "done"
    except Exception as error:
        is_ours = isinstance(error, ap.AutoparError)
        line["error"] = str(error) if is_ours else f"{type(error).__name__}: {error}"[:1000]
    yield line


def _planned(model: nn.Module, inputs: Line, mesh: ap.Mesh) -> tuple[ap.Plan | None, Line]:
    started = time.perf_counter()
    try:
        plan = ap.plan(model, (), inputs, cluster=MACHINES, mesh=mesh)
    except ap.AutoparError as error:
        return None, {"refused": str(error)}
    lost: dict[str, float] = defaultdict(float)
    for fallback in plan.fallbacks:
        lost[fallback.operator] += fallback.cost / plan.cost.seconds
    shares = sorted(lost.items(), key=lambda pair: -pair[1])
    cut = sum(not layout.is_replicated for layout in plan.layouts.values())
    return plan, {
        "seconds": round(time.perf_counter() - started, 2),
        "gap": round(plan.search.gap, 6) if plan.search else None,
        "cut": round(cut / max(len(plan.layouts), 1), 2),
        "without_rule": {name: round(share, 4) for name, share in shares},
    }


def _verified(model: nn.Module, inputs: Line, plan: ap.Plan) -> Line:
    started = time.perf_counter()
    try:
        found = ap.verify(model, (), inputs, plan=plan, steps=STEPS)
    except ap.AutoparError as error:
        return {"exact": False, "differences": str(error)}
    rows = [row for row in (*found.captured, *found.parallel) if not row.ok]
    errors = [row.error for row in found.parallel]
    told: Line = {
        "exact": found.ok,
        "error": max([0.0, *errors]),
        "verify_seconds": round(time.perf_counter() - started, 1),
    }
    if rows:
        told["differences"] = [*map(str, [*found.differences, *rows[:4]])]
    return told


def _lines(names: list[str], arguments: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each family, as they end."""
    built = cases()
    about = arguments.capture, not arguments.skip_parity
    work = {name: partial(measure, built[name], *about) for name in names}
    for name, line in lines_of(work, arguments.workers, arguments.seconds):
        head = families.head_of(name)
        yield {"family": name, "head": head[0] if head else "net", **line}


def summary(lines: list[Line], parity: bool) -> Line:
    """The figures of all."""
    built = [*filter(_is_built, lines)]
    captured = [line for line in built if line["stage"] != "capture"]
    figures: Line = {
        "families": len(lines),
        "built": len(built),
        "captured": len(captured),
        "not_captured": [line["family"] for line in built if line not in captured],
        "not_built": [line["family"] for line in lines if line not in built],
    }
    for name in MESHES:
        made = [line for line in captured if "seconds" in line.get(name, {})]
        if not made:
            continue
        seconds = sorted(line[name]["seconds"] for line in made)
        gaps = sorted(line[name]["gap"] or 0.0 for line in made)
        shares = {line["family"]: sum(line[name]["without_rule"].values()) for line in made}
        figures[name] = {
            "planned": len(made),
            "seconds": {"median": seconds[len(seconds) // 2], "most": seconds[-1]},
            "gap": {"median": gaps[len(gaps) // 2], "most": gaps[-1]},
            "over_target_without_rule": sorted(f for f in shares if shares[f] > TARGET),
        }
        if parity:
            exact = [line["family"] for line in made if line[name].get("exact")]
            figures[name] |= {
                "exact": len(exact),
                "not_exact": [line["family"] for line in made if line["family"] not in exact],
            }
    lost: Counter[str] = Counter()
    for line in captured:
        lost.update(line.get("dp2tp2", {}).get("without_rule", {}).keys())
    figures["operators_without_rule"] = dict(lost.most_common())
    return figures


def joined(paths: list[Path]) -> list[Line]:
    """The lines of several runs; of a family in more than one, what the last says."""
    lines: dict[str, Line] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if "family" in line:
                lines[line["family"]] = line
    return [lines[name] for name in sorted(lines)]


def table(lines: list[Line]) -> str:
    """A row for each family that was built: seconds of capture and plans, gaps, and whether it is
    exact; or why there is none of it. Then the names of the others."""
    meshes = " | ".join(f"{name}: seconds | gap | exact" for name in MESHES)
    rows = [f"| family | capture | {meshes} | reason |", "|" + "---|" * (3 + 3 * len(MESHES))]
    others = [line["family"] for line in lines if not _is_built(line)]
    for line in filter(_is_built, lines):
        cells = [line["family"], str(line.get("capture_seconds", ""))]
        reasons = [line.get("error", "")]
        for name in MESHES:
            found = line.get(name, {})
            exact = {True: "yes", False: "no"}.get(found.get("exact"), "")
            cells += [str(found.get("seconds", "")), str(found.get("gap", "")), exact]
            reasons += [found.get("refused", ""), *found.get("differences", [])[1:2]]
        reason = next((" ".join(one.split()) for one in reasons if one), "")
        rows.append(f"| {' | '.join([*cells, reason[:200].replace('|', '/')])} |")
    return "\n".join([*rows, "", f"Not built ({len(others)}): {', '.join(others)}."])


def _is_built(line: Line) -> bool:
    return line["stage"] not in ("start", "build")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=".*", help="a pattern of whole names of families")
    parser.add_argument("--head", default=".*", help="a pattern of their heads, as MASKED_LM")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240, help="time limit of each family")
    parser.add_argument("--capture", action="store_true", help="capture only")
    parser.add_argument("--skip-parity", action="store_true")
    parser.add_argument("--part", default="1/1", help="of the families, as 2/8")
    parser.add_argument("--join", type=Path, nargs="+", help="files with lines of earlier runs")
    arguments = parser.parse_args()
    if arguments.join:
        lines = joined(arguments.join)
        print(table(lines))
        print(json.dumps({"summary": summary(lines, not arguments.skip_parity)}))
        return
    torch.set_num_threads(1)
    heads = {name: families.head_of(name) for name in cases()}
    names = [
        name
        for name, head in heads.items()
        if re.fullmatch(arguments.only, name)
        and re.fullmatch(arguments.head, head[0] if head else "net")
    ]
    part, parts = map(int, arguments.part.split("/"))
    lines = []
    for line in _lines(names[part - 1 :: parts], arguments):
        print(json.dumps(line), flush=True)
        lines.append(line)
    print(json.dumps({"summary": summary(lines, not arguments.skip_parity)}))


if __name__ == "__main__":
    main()
