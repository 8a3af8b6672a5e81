"""How long planning takes: capture and search apart, a JSON line per case; nothing is allocated.

python -m benchmarks.search [resnet50 gpt2 llama3 gpt3 classifier plan] [--layers 12 96]
    [--algorithms exact recursive propagate] [--memory]

`seconds` are of this process (the machine may do other things), `wall` by the clock. `--layers`
plans other depths of the same models: the search should take about as long for all of them.
With `--memory`, a model whose whole batch no device has room for is searched by micro-batches.
The cases named `plan` make a whole plan where memory binds: mesh, stages, micro-batches, schedule,
states and recomputation are all to be chosen, or all but the last two.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar import Cluster, Mesh, Precision, plan
from autopar.capture import capture
from autopar.passes.microbatches import cut_batch
from autopar.search import auto
from autopar.search.constraints import Constraints
from tests import large_models
from tests.models import Case
from tests.search.other_solvers import SOLVERS


@dataclass(frozen=True)
class Problem:
    """A model on a mesh of some machines."""

    make: Callable[..., Case]
    mesh: Mesh
    cluster: Cluster
    microbatches: int = 1  # that the memory of the devices asks for
    options: dict[str, Any] = field(default_factory=dict)


def problems() -> dict[str, Problem]:
    one = Cluster.preset("dgx-h100")
    return {
        "resnet50-8": Problem(large_models.resnet50, Mesh(x=8), one),
        "gpt2-8": Problem(large_models.gpt2_xl, Mesh(x=8), one),
        "gpt2-2x8": Problem(large_models.gpt2_xl, Mesh(x=2, y=8), Cluster.preset("dgx-h100", 2)),
        "llama3-8x8": Problem(large_models.llama3, Mesh(x=8, y=8), Cluster.preset("dgx-h100", 8)),
        "gpt3-16x8": Problem(
            large_models.gpt3, Mesh(x=4, y=4, z=8), Cluster.preset("dgx-h100", 16), microbatches=8
        ),
        "classifier-8": Problem(large_models.classifier, Mesh(x=8), one),
    }


def measure(name: str, problem: Problem, algorithm: str, memory: bool) -> dict[str, Any]:
    """Plan one case; seconds of capture and of search."""
    clock, wall = time.process_time(), time.perf_counter()
    case = problem.make(**problem.options)
    captured = capture(case.model, case.args, case.kwargs)
    capture_seconds, capture_wall = time.process_time() - clock, time.perf_counter() - wall
    limit, parts = (problem.cluster.device.memory, problem.microbatches) if memory else (None, 1)
    if parts > 1:
        captured = cut_batch(captured, parts).captured
    clock, wall = time.process_time(), time.perf_counter()
    constraints = Constraints()
    auto.solve = SOLVERS[algorithm]
    search = auto.LayoutSearch(captured, problem.cluster, lambda mesh: constraints, limit, parts)
    found = search.run([problem.mesh]).search
    assert found is not None
    return {
        "case": name,
        "algorithm": algorithm,
        "mesh": str(problem.mesh),
        "operators": len(captured.graph.nodes),
        "capture_seconds": round(capture_seconds, 3),
        "capture_wall": round(capture_wall, 3),
        "search_seconds": round(time.process_time() - clock, 3),
        "search_wall": round(time.perf_counter() - wall, 3),
        "step": found.objective,
        "gap": found.gap,
        "memory_limit": limit,
        "microbatches": parts,
        "folded": found.sizes.folded_nodes,
        "nodes": found.sizes.nodes,
        "runs": found.sizes.runs,
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def whole_plans() -> dict[str, dict[str, Any]]:
    """What is given by hand of plans for GPT-3 on 128 devices."""
    mesh = Mesh(pp=8, dp=2, tp=8)
    return {"plan-gpt3": {}, "plan-gpt3-mesh": {"mesh": mesh, "schedule": "1f1b"}}


def measure_plan(name: str, given: dict[str, Any], layers: int) -> dict[str, Any]:
    """Make one plan; seconds of capture and of all that follows. Fewer layers have less memory."""
    cluster, most = Cluster.preset("dgx-a100", 16), 96
    case = large_models.gpt3(batch=256, layers=layers or most)
    started, marks = time.process_time(), dict[str, float]()

    def mark(phase: str, detail: str) -> None:
        marks.setdefault(phase, time.process_time())

    made = plan(
        case.model,
        case.args,
        case.kwargs,
        cluster=cluster,
        memory=cluster.device.memory * (layers or most) / most,
        precision=Precision(compute=torch.bfloat16),
        progress=mark,
        **given,
    )
    return {
        "case": name,
        "layers": layers or most,
        "capture_seconds": round(marks["pipeline"] - started, 3),
        "plan_seconds": round(time.process_time() - marks["pipeline"], 3),
        "step": made.cost.seconds,
        "mesh": str(made.mesh),
        "states": str(made.states),
        "memory": made.memory.peak,
        "alternatives": len(made.alternatives),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help="all if none is given")
    parser.add_argument("--algorithms", nargs="+", default=["exact"])
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="0: all of the model")
    parser.add_argument("--memory", action="store_true", help="keep to the memory of the device")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, problem in problems().items():
        if given.cases and not any(name.startswith(case) for case in given.cases):
            continue
        for layers in given.layers:
            if layers:
                problem.options["layers"] = layers
            for algorithm in given.algorithms:
                print(json.dumps(measure(name, problem, algorithm, given.memory)), flush=True)
    for name, options in whole_plans().items():
        if not given.cases or any(name.startswith(case) for case in given.cases):
            for layers in given.layers:
                print(json.dumps(measure_plan(name, options, layers)), flush=True)


if __name__ == "__main__":
    main()
