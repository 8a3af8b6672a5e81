"""How long planning takes: capture and search apart, a JSON line per case; nothing is allocated.

python -m benchmarks.search [resnet50 gpt2 llama3 gpt3 classifier plan plan-gpt3-128]
    [--layers 12 96] [--algorithms exact recursive propagate] [--memory]
python -m benchmarks.search --families [mamba rwkv] [--solver-seconds 10] [--limit 0.6]

`seconds` are of this process (the machine may do other things), `wall` by the clock. `--layers`
plans other depths of the same models: the search should take about as long for all of them.
With `--memory`, a model whose whole batch no device has room for is searched by micro-batches.
Each case is measured in a process of its own; a name stands for all cases that begin with it. Those
that begin with `plan` make whole plans (`whole_plans.py`): mesh, stages, micro-batches, schedule,
states and recomputation are all to be chosen, in the seconds that a choice has by default:
`ended_early` says whether these were over before all was weighed, `gap` how far below the bound is.

With `--families`, tiny models of those families whose graphs elimination does not end on are solved
on meshes of two and of three axes, each without a limit of memory and with one: a part of what the
answer without it needs, of which the search counts parameters and what is kept, or halfway to the
least that any choice needs, where none is as small as that. A line tells the objective, its bound
and gap, seconds of each phase, and how large the graph is before and after pruning.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from autopar import Cluster, Mesh
from autopar.capture import capture
from autopar.cluster.cluster import Link, Node
from autopar.passes.microbatches import cut_batch
from autopar.search import layout_search
from autopar.search.constraints import Constraints
from autopar.search.cost_graph_builder import CostGraphBuilder
from autopar.solver.cost_graph import CostGraph
from autopar.solver.lagrangian import NoRoom
from autopar.solver.optimum import SECONDS
from autopar.solver.solve import least_memory, solve
from benchmarks.models import WEAK, cases
from benchmarks.whole_plans import WHOLE_PLANS, measure_plan
from tests import large_models
from tests.models import Case
from tests.search.other_solvers import SOLVERS

FAMILIES = ("mamba", "rwkv", "pegasus_x", "focalnet", "hrm_text", "timesfm2_5", "gptj")
MESHES = (Mesh(x=2, y=2), Mesh(x=2, y=2, z=2))


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


def measure(name: str, algorithm: str, memory: bool, layers: int) -> dict[str, Any]:
    """Lay out one case, of some layers or of all; seconds of capture and of search."""
    problem = problems()[name]
    if layers:
        problem.options["layers"] = layers
    clock, wall = time.process_time(), time.perf_counter()
    case = problem.make(**problem.options)
    captured = capture(case.model, case.args, case.kwargs)
    capture_seconds, capture_wall = time.process_time() - clock, time.perf_counter() - wall
    limit, parts = (problem.cluster.device.memory, problem.microbatches) if memory else (None, 1)
    if parts > 1:
        captured = cut_batch(captured, parts).captured
    clock, wall = time.process_time(), time.perf_counter()
    constraints = Constraints()
    layout_search.solve = SOLVERS[algorithm]
    search = layout_search.LayoutSearch(
        captured, problem.cluster, lambda mesh: constraints, limit, parts
    )
    found = search.run([problem.mesh]).report
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


def measure_family(name: str, part: float, seconds: float) -> Iterator[dict[str, Any]]:
    """Solve one family on each mesh, without and with a limit of memory."""
    model, inputs = cases()[name]()
    clock = time.process_time()
    captured = capture(model, (), inputs)
    capture_seconds = time.process_time() - clock
    for mesh in MESHES:
        machine = Node(WEAK, mesh.size, Link(alpha=1e-7, bandwidth=1e9))
        clock = time.process_time()
        machines = Cluster((machine,), Link(1e-7, 1e9), "weak")
        built = CostGraphBuilder(captured, mesh, machines, Constraints()).run()
        about = {
            "case": name,
            "mesh": str(mesh),
            "capture_seconds": round(capture_seconds, 3),
            "build_seconds": round(time.process_time() - clock, 3),
        }
        free = _solved(built.graph, None, seconds)
        yield {**about, **free}
        limit = part * (free["memory"] + built.fixed_bytes) - built.fixed_bytes
        least, _ = least_memory(built.graph)
        if limit < least:
            limit = (least + free["memory"]) / 2
        try:
            yield {**about, **_solved(built.graph, limit, seconds)}
        except NoRoom as error:  # the least was found above, and not in the time of a search
            yield {**about, "memory_limit": limit, "refused": error.got}


def _solved(graph: CostGraph, limit: float | None, seconds: float) -> dict[str, Any]:
    """What there is to tell of the best choice and of how it was found."""
    marks, clock = list[tuple[str, float]](), time.process_time()

    def mark(phase: str, detail: str) -> None:
        marks.append((phase, time.process_time()))

    found = solve(graph, limit, mark, seconds=seconds)
    ended = time.process_time()
    phases = dict[str, float]()
    for (phase, since), (_, until) in zip(marks, [*marks[1:], ("", ended)]):
        phases[phase] = phases.get(phase, 0.0) + until - since
    sizes = found.sizes
    return {
        "memory_limit": limit,
        "memory": found.memory,
        "step": found.objective,
        "bound": found.bound,
        "gap": found.gap,
        "nodes": sizes.nodes,
        "strategies": sizes.strategies,
        "pruned_strategies": sizes.pruned_strategies,
        "core": sizes.core_nodes,
        "search_seconds": round(ended - clock, 3),
        "phases": {phase: round(taken, 3) for phase, taken in phases.items()},
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help="all if none is given")
    parser.add_argument("--algorithms", nargs="+", default=["exact"])
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="0: all of the model")
    parser.add_argument("--memory", action="store_true", help="keep to the memory of the device")
    parser.add_argument("--families", action="store_true", help="the tiny models of families")
    parser.add_argument("--limit", type=float, default=0.6, help="of memory, for families")
    parser.add_argument("--solver-seconds", type=float, default=SECONDS, help="of each search")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.families:
        for name in given.cases or FAMILIES:
            for line in measure_family(name, given.limit, given.solver_seconds):
                print(json.dumps(line), flush=True)
        return
    starts = tuple(given.cases)
    for layers in given.layers:
        for name in problems():
            for algorithm in given.algorithms:
                if name.startswith(starts or name):
                    tell(measure, name, algorithm, given.memory, layers)
        for name in WHOLE_PLANS:
            if name.startswith(starts or name):
                tell(measure_plan, name, layers)


def tell(measure: Callable[..., dict[str, Any]], *about: Any) -> None:
    """Print what is measured in a process of its own, whose memory and first calls no other has."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, warnings.simplefilter, ("ignore",)) as pool:
        print(json.dumps(pool.submit(measure, *about).result()), flush=True)


if __name__ == "__main__":
    main()
