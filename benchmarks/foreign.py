"""Foreign: models of packages outside transformers, each beside plain PyTorch.

    pip install -e '.[foreign]'                            # the packages, or some of them
    python -m benchmarks.foreign --only 'timm/.*' --workers 2
    python -m benchmarks.foreign --build                   # only which are built: seconds for each
    python -m benchmarks.foreign --join lines.json --table docs/foreign_models.md

Prints a line of JSON for each model, and at the end a summary. A model is built small, with random
weights, in training mode without dropout, in float64, and trained for three steps of AdamW: as it
is, and by `parallelize` on the virtual mesh, dp=2, tp=2 and pp=2. Loss, every gradient, and
parameters and buffers at the end agree below 1e-9 (`tests/parity.py`), or the model is wrong. What
draws random numbers in forward, or goes through a coarser dtype, is compared by `autopar.verify`,
which gives both sides the same numbers and measures the rounding. Each model has a process and a
time limit of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar as ap
from autopar.cluster.cluster import Cluster, Device, Link, Node
from benchmarks.foreign_models import CASES
from benchmarks.foreign_models.binaries import prepare_imports
from benchmarks.processes import Line, lines_of
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome

WEAK = Device("weak", {"f32": 1e9}, memory=8e9, bandwidth=1e9, overhead=1e-7)
LINK = Link(alpha=1e-7, bandwidth=1e9)
MESHES = {"dp2tp2": ap.Mesh(dp=2, tp=2), "pp2": ap.Mesh(pp=2)}
STEPS = 3
WHOLE_RUN = 4 * 3600.0  # seconds of a package, at most
VERDICTS = ("equal", "refused", "wrong", "raw error")
PAGE = """
# Models of other packages

Which models of packages outside transformers are trained as plain PyTorch trains them, as
`python -m benchmarks.foreign` measures it with torch {torch}. Each is built small, with random
weights, in training mode without dropout, in float64, and trained for three steps of AdamW: as it
is, and by `parallelize` on two meshes. **equal** means that the loss of each step, every gradient,
and all parameters and buffers at the end agree below 1e-9; where a model draws random numbers in
forward or goes through a coarser dtype, `autopar.verify` compares it, which draws the same numbers
on both sides and measures the rounding. **refused** means that planning ends with an error that
names the rule, the remedy and the line. A **wrong** number or a **raw error** is a fault of
autopar.

{built} models of {packages} packages are built.
"""


def machines(mesh: ap.Mesh) -> Cluster:
    """Return machines that are as weak beside these models as real ones are beside real models."""
    return Cluster((Node(WEAK, mesh.size, LINK),), LINK, "weak")


class Loss(nn.Module):
    """A model with a loss: the means of a curved function of all that it gives, together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        total = torch.zeros(())
        for output in pytree.tree_leaves(self.model(*args, **kwargs)):
            if not isinstance(output, Tensor) or not output.requires_grad:
                continue
            real = torch.view_as_real(output) if output.is_complex() else output
            total = total + (real if real.ndim == 0 else (real.sigmoid() - 0.3).square().mean())
        return total


def prepared(name: str) -> Case:
    """Return a model to train with its batch: in float64, without dropout."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    built = CASES[name]()
    model = Loss(built.model).double().train()
    model._apply(lambda value: value.cdouble() if value.is_complex() else value)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0

    def double(leaf: Tensor) -> Tensor:
        return leaf.double() if leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map_only(Tensor, double, (built.args, built.kwargs))
    return Case(name, model, args, kwargs)


def draws(name: str) -> bool:
    """Return whether two runs of a model differ, as where it draws random numbers."""
    first, second = prepared(name), prepared(name)
    loss = first.run()
    return not torch.equal(loss, second.run())


def measure_package(names: list[str], meshes: list[str], seconds: float) -> Iterator[Line]:
    """Yield the lines of the models of a package, which share its imports."""
    with suppress(Exception):  # a model that cannot be built says so in its own line
        prepared(names[0])
    lines: list[Line] = []
    work = {name: partial(measure, name, meshes) for name in names}
    for name, line in lines_of(work, 1, seconds):
        lines.append({"model": name, **line})
        yield {"stage": "run", "lines": lines}
    yield {"stage": "done", "lines": lines}


def measure(name: str, meshes: list[str]) -> Iterator[Line]:
    """Yield what is known of a model, each time that more is: its verdict on each mesh."""
    line: Line = {"stage": "build"}
    try:
        case = prepared(name)
        line["parameters"] = sum(p.numel() for p in case.model.parameters())
        case.run().backward()
        line["draws"] = draws(name)
    except Exception as error:
        yield line | {"error": _said(error)}
        return
    for mesh in meshes:
        line["stage"] = mesh
        yield line
        started = time.process_time()
        line[mesh] = compared(name, MESHES[mesh], line["draws"])
        line[mesh]["seconds"] = round(time.process_time() - started, 1)
    yield line | {"stage": "done"}


def compared(name: str, mesh: ap.Mesh, is_random: bool) -> Line:
    """Return the verdict on a model and a mesh, with its reason."""
    options: Line = {"mesh": mesh, "cluster": machines(mesh)}
    try:
        if is_random:
            return verified(name, options)
        case = prepared(name)
        module = ap.parallelize(case.model, case.args, case.kwargs, backend="virtual", **options)
        actual = parallel_outcome(module, case, STEPS)
        assert_equal(actual, single_outcome(prepared(name), STEPS))
    except AssertionError as error:
        return {"differences": str(error)} | verified(name, options)
    except ap.InvalidInput as error:
        return {"verdict": "refused", "reason": error.rule, "message": str(error)}
    except Exception as error:
        return {"verdict": "raw error", "reason": _said(error), "message": _said(error)}
    return {"verdict": "equal"}


def verified(name: str, options: Line) -> Line:
    """Return the verdict of `verify`, which draws the same numbers on both sides."""
    case = prepared(name)
    verification = ap.verify(case.model, case.args, case.kwargs, steps=STEPS, **options)
    if not verification.differs:
        return {"verdict": "equal", "by": "verify"}
    return {"verdict": "wrong", "reason": "verify", "message": str(verification)}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


def summary(lines: list[Line]) -> Line:
    """Return the figures of all models: of each mesh how many there are of each verdict."""
    built = [line for line in lines if line["stage"] != "build"]
    figures: Line = {
        "models": len(lines),
        "built": len(built),
        "packages": len({package_of(line) for line in built}),
        "not_built": [line["model"] for line in lines if line not in built],
    }
    for mesh in MESHES:
        verdicts: defaultdict[str, list[str]] = defaultdict(list)
        for line in built:
            verdicts[verdict_of(line, mesh)].append(line["model"])
        figures[mesh] = {
            verdict: len(names) if verdict == "equal" else sorted(names)
            for verdict, names in verdicts.items()
        }
    return figures


def package_of(line: Line) -> str:
    return line["model"].partition("/")[0]


def verdict_of(line: Line, mesh: str) -> str:
    """Return a verdict; a process that ended, or was ended, before it had one is a raw error."""
    return line[mesh]["verdict"] if mesh in line else "raw error"


def refusals(lines: list[Line]) -> dict[str, list[str]]:
    """Return the rules by which models are refused, with their names; the most frequent first."""
    by_rule: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        rules = {line[mesh]["reason"] for mesh in MESHES if mesh in line and "reason" in line[mesh]}
        for rule in sorted(rules):
            by_rule[rule].append(line["model"])
    return dict(sorted(by_rule.items(), key=lambda pair: -len(pair[1])))


def page(lines: list[Line]) -> str:
    """Return the table of all models as a page of the documentation."""
    figures = summary(lines)
    built = [line for line in lines if line["stage"] != "build"]
    counts = [
        f"| {verdict} | " + " | ".join(str(_count(built, mesh, verdict)) for mesh in MESHES) + " |"
        for verdict in VERDICTS
    ]
    rows = [
        f"| {line['model']} | {line['parameters']:,} | "
        + " | ".join(_cell(line, mesh) for mesh in MESHES)
        + " |"
        for line in sorted(built, key=lambda line: line["model"].lower())
    ]
    rules = [f"- {rule} ({', '.join(names)})" for rule, names in refusals(built).items()]
    not_built = ", ".join(figures["not_built"])
    return "\n".join(
        [
            PAGE.format(**figures, torch=torch.__version__.partition("+")[0]).strip(),
            "",
            f"| | {' | '.join(map(str, MESHES.values()))} |",
            "|---" * (1 + len(MESHES)) + "|",
            *counts,
            "",
            "## Why models are refused",
            "",
            *rules,
            "",
            "## All models",
            "",
            f"| model | parameters | {' | '.join(map(str, MESHES.values()))} |",
            "|---" * (2 + len(MESHES)) + "|",
            *rows,
            *(["", f"Not built: {not_built}."] if not_built else []),
            "",
        ]
    )


def _count(lines: list[Line], mesh: str, verdict: str) -> int:
    return sum(verdict_of(line, mesh) == verdict for line in lines)


def _cell(line: Line, mesh: str) -> str:
    is_by_verify = line.get(mesh, {}).get("by") == "verify"
    return verdict_of(line, mesh) + (" (verify)" if is_by_verify else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=".*", help="a pattern of whole names, package/model")
    parser.add_argument("--mesh", choices=list(MESHES), help="of both, if left out")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="CPU seconds of each model")
    parser.add_argument("--join", type=Path, nargs="+", help="files with lines of earlier runs")
    parser.add_argument("--table", type=Path, help="a file for the table, in Markdown")
    arguments = parser.parse_args()
    lines = joined(arguments.join) if arguments.join else [*run(arguments)]
    print(json.dumps({"summary": summary(lines), "refused": refusals(lines)}))
    if arguments.table:
        arguments.table.write_text(page(lines))


def run(arguments: argparse.Namespace) -> Iterator[Line]:
    """Yield the line of each model, and print it."""
    torch.set_num_threads(1)
    prepare_imports()
    meshes = [arguments.mesh] if arguments.mesh else list(MESHES)
    packages: defaultdict[str, list[str]] = defaultdict(list)
    for name in CASES:
        if re.fullmatch(arguments.only, name):
            packages[name.partition("/")[0]].append(name)
    work = {
        package: partial(measure_package, names, meshes, arguments.seconds)
        for package, names in packages.items()
    }
    for _, result in lines_of(work, arguments.workers, WHOLE_RUN):
        for line in result.get("lines", []):
            print(json.dumps(line), flush=True)
            yield line


def joined(paths: list[Path]) -> list[Line]:
    """Return the lines of earlier runs; of a model in several, what the last says of each mesh."""
    lines: dict[str, Line] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if "model" in line:
                lines[line["model"]] = lines.get(line["model"], {}) | line
    return list(lines.values())


if __name__ == "__main__":
    main()
