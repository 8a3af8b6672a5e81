"""Auto: the whole search for one captured model: the mesh, and every layout on it.

Each mesh in question gets its cost graph and its exact optimum. A mesh whose operators alone,
without any movement, already take longer than the best plan so far is not solved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.search.build import Built, build
from autopar.search.decide import decide
from autopar.search.decisions import Decisions
from autopar.search.solve import Sizes, Solution, least_memory, solve
from autopar.search.wishes import Wishes

Progress = Callable[[str, str], None]  # phase, detail


@dataclass(frozen=True)
class Considered:
    """One mesh that was weighed."""

    mesh: Mesh
    seconds: float | None  # predicted for a step; None: not solved
    memory: float | None
    why: str = ""  # why it was not solved or not taken


@dataclass(frozen=True)
class Search:
    """The account of a search: how long, how good, how large, what else was weighed."""

    seconds: float
    objective: float  # predicted seconds of a step, as the search adds them up
    bound: float  # no plan that fits takes less
    gap: float
    algorithm: str
    sizes: Sizes
    considered: tuple[Considered, ...] = ()
    interrupted: bool = False

    def to_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            "algorithm": self.algorithm,
            "sizes": self.sizes.to_json(),
            "considered": [
                {
                    "mesh": dict(zip(c.mesh.names, c.mesh.shape)),
                    "seconds": c.seconds,
                    "memory": c.memory,
                    "why": c.why,
                }
                for c in self.considered
            ],
        }


@dataclass(frozen=True)
class Found:
    """What the search found, and the cost graph in which it did."""

    decisions: Decisions
    search: Search
    built: Built
    solution: Solution


@dataclass
class _Best:
    mesh: Mesh | None = None
    built: Built | None = None
    solution: Solution | None = None
    wishes: Wishes | None = None
    considered: list[Considered] = field(default_factory=list)
    least: float = float("inf")  # of memory, when nothing fits


def search(
    captured: Captured,
    meshes: Sequence[Mesh],
    cluster: Cluster,
    wishes: Callable[[Mesh], Wishes],
    memory: float | None,
    algorithm: str = "exact",
    progress: Progress | None = None,
) -> Found:
    """The fastest plan over all `meshes` that needs at most `memory` bytes on each device."""
    started = time.perf_counter()
    report = progress or (lambda phase, detail: None)
    best = _Best()
    for mesh in meshes:
        report("mesh", str(mesh))
        _weigh(captured, mesh, cluster, wishes(mesh), memory, algorithm, report, best)
    if best.solution is None or best.built is None or best.mesh is None:
        raise InvalidInput(
            "a plan fits into the memory of every device",
            got=f"a limit of {_bytes(memory)}; the least that any plan needs is "
            f"{_bytes(best.least)}",
            remedy="more devices, a smaller batch, micro-batches, or a device with more memory",
        )
    assert best.wishes is not None
    solution = best.solution
    decisions = decide(captured, best.mesh, best.built, solution.choice, best.wishes)
    account = Search(
        seconds=time.perf_counter() - started,
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        algorithm=algorithm,
        sizes=solution.sizes,
        considered=tuple(best.considered),
        interrupted=solution.interrupted,
    )
    return Found(decisions, account, best.built, solution)


def _weigh(
    captured: Captured,
    mesh: Mesh,
    cluster: Cluster,
    wishes: Wishes,
    memory: float | None,
    algorithm: str,
    report: Progress,
    best: _Best,
) -> None:
    """Solve one mesh, unless it cannot be the best, and keep it if it is."""
    built = build(captured, mesh, cluster, wishes)
    so_far = best.solution.objective if best.solution is not None else float("inf")
    tables, _, numbers, _ = built.graph.tables()
    alone = sum(float(tables[number].cost.min()) for number in numbers)
    if alone >= so_far:
        why = f"its operators alone take {alone:.3g} s"
        best.considered.append(Considered(mesh, None, None, why))
        return
    try:
        solution = solve(built.graph, memory, algorithm, report)
    except InvalidInput:
        least = least_memory(built.graph)
        if memory is None or least <= memory:
            raise
        best.least = min(best.least, least)
        why = f"needs at least {_bytes(least)}"
        best.considered.append(Considered(mesh, None, least, why))
        return
    best.considered.append(Considered(mesh, solution.objective, solution.memory))
    if solution.objective < so_far:
        best.mesh, best.built, best.solution, best.wishes = mesh, built, solution, wishes


def _bytes(count: float | None) -> str:
    return "no limit" if count is None else f"{count / 1e9:.3f} GB"
