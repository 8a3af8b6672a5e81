"""Auto: the whole search for one captured model: the mesh, and every layout on it.

Each mesh in question gets its cost graph and its exact optimum. A mesh whose operators alone,
without any movement, already take longer than the best plan so far is not solved. Where there are
many meshes with so many axes, only those are that split an axis of one of the best with fewer axes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.errors import ExecutionError
from autopar.mesh import Mesh
from autopar.search.build import Built, build
from autopar.search.constraints import Constraints
from autopar.search.decide import decide
from autopar.search.decisions import Decisions
from autopar.search.smallest_footprint import NothingFits, SmallestFootprint, bytes_text
from autopar.search.stored import Axes
from autopar.solver.lagrangian import NoRoom
from autopar.solver.residual import relative_gap
from autopar.solver.solve import Sizes, Solution, least_memory, solve

MOST_OF_A_KIND = 8  # meshes with the same number of axes that are all tried
MOST_REFINED = 2  # meshes whose axes are split, where there are more
_TIGHTENED = 6  # times that a limit is lowered because the finished program needs more
_SURE = 0.7  # a part of the limit; what needs less surely fits when it is finished
_TIE = 2e-3  # relative: of meshes about as good, the one with fewer axes is taken

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
    bound: float  # no plan that fits takes less, on any mesh that was tried; 0: not known
    gap: float
    sizes: Sizes
    considered: tuple[Considered, ...] = ()
    interrupted: bool = False  # the best so far; what was not weighed may be better
    multiplier: float = 0.0  # under a memory limit: seconds that one more byte would save

    def cut_short(self) -> Search:
        """The same, with something left that was not weighed: it might take no time at all."""
        return replace(self, interrupted=True, bound=0.0, gap=relative_gap(self.objective, 0.0))

    def shared(self, ranks: int) -> Search:
        """The same of a pipeline, on whose `ranks` the work of all stages is done side by side."""
        considered = tuple(
            replace(one, seconds=None if one.seconds is None else one.seconds / ranks)
            for one in self.considered
        )
        objective, bound = self.objective / ranks, self.bound / ranks
        return replace(self, objective=objective, bound=bound, considered=considered)

    def to_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
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
            "interrupted": self.interrupted,
            "multiplier": self.multiplier,
        }


@dataclass(frozen=True)
class StoredConsidered:
    mesh: Axes
    seconds: float | None
    memory: float | None
    why: str = ""

    def read(self) -> Considered:
        return Considered(Mesh(**self.mesh), self.seconds, self.memory, self.why)


@dataclass(frozen=True)
class StoredSearch:
    """What `Search.to_json` writes."""

    seconds: float
    objective: float
    bound: float
    gap: float
    sizes: Sizes
    considered: tuple[StoredConsidered, ...] = ()
    interrupted: bool = False
    multiplier: float = 0.0

    def read(self) -> Search:
        considered = tuple(entry.read() for entry in self.considered)
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return Search(**{**known, "considered": considered})


@dataclass(frozen=True)
class Found:
    """Layouts for a program; with the account of the search, where they were searched for."""

    decisions: Decisions
    search: Search | None = None
    memory: float = 0.0  # bytes on each device, as the search adds them up

    @property
    def interrupted(self) -> bool:
        return self.search is not None and self.search.interrupted


@dataclass
class _Best:
    mesh: Mesh | None = None
    built: Built | None = None
    solution: Solution | None = None
    constraints: Constraints | None = None
    bound: float = math.inf  # the least of all meshes that were weighed
    considered: list[Considered] = field(default_factory=list)
    leanest: SmallestFootprint | None = None  # when nothing fits

    def cannot_beat(self, bound: float, slack: float) -> None:
        """No plan on some mesh is below `bound`, but for what a cut prologue would save."""
        self.bound = min(self.bound, max(0.0, bound - slack))


def search(
    captured: Captured,
    meshes: Sequence[Mesh],
    cluster: Cluster,
    constraints: Callable[[Mesh], Constraints],
    memory: float | None,
    progress: Progress | None = None,
    finished: Callable[[Decisions], float] | None = None,
    microbatches: int = 1,
) -> Found:
    """The fastest plan over all `meshes` that needs at most `memory` bytes on each device.

    `captured` is the program of one of `microbatches`. `finished` tells the bytes that the
    finished program needs: the last word on what fits.
    """
    started = time.perf_counter()
    report = progress or (lambda phase, detail: None)
    best = _Best()
    interrupted = False
    left: Sequence[Mesh] = ()  # by an interrupt
    for number, mesh in enumerate(meshes):
        try:
            report("mesh", f"{number + 1} of {len(meshes)}: {mesh}")
            if not _is_worth(mesh, meshes, best):
                why = "splits no axis of the best meshes with fewer axes"
                best.considered.append(Considered(mesh, None, None, why))
                continue
            asked_for = constraints(mesh)
            asked = _Asked(captured, cluster, asked_for, memory, report, finished, microbatches)
            interrupted, left = _weigh(asked, mesh, best), meshes[number + 1 :]
        except (KeyboardInterrupt, ExecutionError) as error:
            if not was_interrupted(error):
                raise
            interrupted, left = True, meshes[number:]
        if interrupted:
            why = "the search was interrupted"
            best.considered += [Considered(m, None, None, why) for m in left]
            break
    if best.solution is None or best.built is None or best.mesh is None:
        if interrupted:
            raise too_early()
        assert best.leanest is not None
        assert memory is not None
        raise NothingFits.of(memory, best.leanest)
    assert best.constraints is not None
    solution = best.solution
    bound = min(best.bound, solution.objective)
    decisions = decide(captured, best.mesh, best.built, solution.choice, best.constraints)
    account = Search(
        seconds=time.perf_counter() - started,
        objective=solution.objective * microbatches,
        bound=bound * microbatches,
        gap=relative_gap(solution.objective, bound),
        sizes=solution.sizes,
        considered=tuple(best.considered),
        interrupted=interrupted,
        multiplier=solution.multiplier,
    )
    account = account.cut_short() if interrupted and left else account
    return Found(decisions, account, solution.memory + best.built.fixed_bytes)


def was_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)


def too_early() -> ExecutionError:
    """The error of a search that was interrupted with nothing to show."""
    return ExecutionError(
        "a search runs until it has found a plan",
        got="an interrupt before the first one was found",
        remedy="let it run longer, or give it a mesh",
    )


def _is_worth(mesh: Mesh, meshes: Sequence[Mesh], best: _Best) -> bool:
    """Whether to try a mesh: all of a kind, if they are few, else those that split a good one."""
    axes = len(mesh.names)
    if sum(len(other.names) == axes for other in meshes) <= MOST_OF_A_KIND:
        return True
    tried = [c for c in best.considered if len(c.mesh.names) == axes - 1 and c.seconds is not None]
    tried.sort(key=lambda considered: considered.seconds or 0.0)
    return not tried or any(_splits(mesh, other.mesh) for other in tried[:MOST_REFINED])


def _splits(mesh: Mesh, coarse: Mesh) -> bool:
    """Whether one axis of `coarse` split in two gives `mesh`."""
    sizes = mesh.shape
    return any(
        (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]) == coarse.shape
        for at in range(len(sizes) - 1)
    )


@dataclass(frozen=True)
class _Asked:
    """What is asked of every mesh."""

    captured: Captured
    cluster: Cluster
    constraints: Constraints
    memory: float | None
    report: Progress
    finished: Callable[[Decisions], float] | None
    microbatches: int


def _weigh(asked: _Asked, mesh: Mesh, best: _Best) -> bool:
    """Solve one mesh, unless it cannot be the best; keep it if it is. Whether Ctrl-C came."""
    asked.report("build", f"the cost graph of {mesh}")
    built = build(asked.captured, mesh, asked.cluster, asked.constraints, asked.microbatches)
    so_far = best.solution.objective if best.solution is not None else float("inf")
    tables, _, numbers, _ = built.graph.tables()
    fastest = [float(table.cost.min()) for table in tables]
    alone = sum(fastest[number] for number in numbers)
    if alone >= so_far:
        why = f"its operators alone take {alone:.3g} s"
        best.considered.append(Considered(mesh, None, None, why))
        best.cannot_beat(alone, built.slack)
        return False
    try:
        solution = _fitting(asked, mesh, built, best)
    except NoRoom:
        least, choice = least_memory(built.graph)
        least += built.fixed_bytes
        if best.leanest is None or least < best.leanest.memory:
            states = _states(built, choice)
            best.leanest = SmallestFootprint(
                str(mesh), mesh.size, least, states, asked.microbatches
            )
        why = f"needs at least {bytes_text(least)}"
        best.considered.append(Considered(mesh, None, least, why))
        return False
    if solution.bound >= so_far:
        bound = solution.bound * asked.microbatches
        best.considered.append(Considered(mesh, bound, None, "takes at least that"))
        return solution.interrupted
    needed = solution.memory + built.fixed_bytes
    best.considered.append(Considered(mesh, solution.objective * asked.microbatches, needed))
    if solution.objective < so_far * (1 - _TIE):
        best.mesh, best.built, best.solution, best.constraints = (
            mesh,
            built,
            solution,
            asked.constraints,
        )
    return solution.interrupted


def _fitting(asked: _Asked, mesh: Mesh, built: Built, best: _Best) -> Solution:
    """The best solution whose finished program fits; an error if there is none."""
    memory, finished = asked.memory, asked.finished
    limit = None if memory is None else memory - built.fixed_bytes
    so_far, guess = float("inf"), 0.0
    if best.solution is not None:
        so_far, guess = best.solution.objective, best.solution.multiplier

    def solved() -> Solution:
        return solve(built.graph, limit, asked.report, cutoff=so_far, multiplier=guess)

    solution = solved()
    best.cannot_beat(solution.bound, built.slack)
    if memory is None or limit is None or finished is None:
        return solution
    for _ in range(_TIGHTENED):
        if solution.memory <= _SURE * limit or solution.objective >= so_far:
            return solution
        needed = finished(decide(asked.captured, mesh, built, solution.choice, asked.constraints))
        if needed <= memory:
            return solution
        limit = min(limit, solution.memory) - (needed - memory)
        solution = solved()
    raise NoRoom(
        "the finished program fits into memory",
        got=f"{bytes_text(needed)} with a limit of {bytes_text(memory)}",
        remedy="a little more memory",
    )


def _states(built: Built, choice: Sequence[int]) -> float:
    """The bytes of parameters with gradients and optimizer states."""
    tables, _, numbers, _ = built.graph.tables()
    total = 0.0
    for variable in built.parameters.values():
        memory = tables[numbers[variable.number]].memory
        total += 0.0 if memory is None else float(memory[choice[variable.number]])
    return total
