"""Auto: the whole search for one captured model: the mesh, and every layout on it.

Each mesh in question gets its cost graph and its exact optimum. A mesh whose operators alone,
without any movement, already take longer than the best plan so far is not solved. Where there are
many meshes with so many axes, only those are that split an axis of one of the best with fewer axes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.errors import Interrupted
from autopar.mesh import Mesh
from autopar.search.constraints import Constraints
from autopar.search.cost_graph_builder import CostGraphBuilder, MeshCostGraph
from autopar.search.decisions import Decisions
from autopar.search.search_report import ConsideredMesh, SearchReport
from autopar.search.smallest_footprint import NothingFits, SmallestFootprint
from autopar.search.solution_reader import decide
from autopar.solver.cp_sat_residual import relative_gap
from autopar.solver.lagrangian import NoRoom
from autopar.solver.solve import Solution, least_limit, least_memory, solve
from autopar.states import WHOLE, States
from autopar.strategies.node_info import info
from autopar.text.progress import Report
from autopar.text.units import bytes_text, seconds_text

MOST_OF_A_KIND = 8  # meshes with the same number of axes that are all tried
MOST_SPLIT = 2  # meshes whose axes are split, where there are more; of a large program the best
_TIGHTENED = 6  # solutions whose finished programs are looked at, under a lower limit each
_WIDENED = 2  # and raised again, where what fits then is not known to be about as fast
_CLOSE = 0.01  # relative: of what is so near the bound nothing better is looked for
_SMALL = 500  # calls of a program that is finished so often
_SURE = 0.7  # a part of the limit: of larger programs, what needs less fits when it is finished
_FAR = 1.25  # times what the best takes: graphs of meshes that take more are not kept
_TIE = 1e-6  # relative: of meshes that are as good, the one with fewer axes is taken
# Of large programs, relative:
_ALIKE = 0.05  # by so much more in smaller micro-batches, a mesh is as good as it was
_SPARE = 0.0025  # under a limit, a mesh that may save less is not looked at
_GAIN = 1e-3  # where an axis more, or one that is split, saved less, the next is to save nothing


@dataclass(frozen=True)
class SearchResult:
    """Layouts for a program; with the account of the search, where they were searched for."""

    decisions: Decisions
    search: SearchReport | None = None
    memory: float = 0.0  # bytes on each device, as the search adds them up


@dataclass(frozen=True)
class _MeshSolution:
    """The best plan on one mesh."""

    built: MeshCostGraph
    solution: Solution

    @cached_property
    def decisions(self) -> Decisions:
        return decide(self.built, self.solution.choice)

    @property
    def memory(self) -> float:
        """Bytes on each device, as the search adds them up."""
        return self.solution.memory + self.built.fixed_bytes


@dataclass(frozen=True)
class SearchCache:
    """What is known of one program, with its constraints and states, from search to search."""

    graphs: dict[Mesh, MeshCostGraph] = field(default_factory=dict)
    least: dict[Mesh, float] = field(default_factory=dict)  # seconds, whatever memory it takes
    # The same of a step in larger micro-batches, with which none takes longer.
    fewer: Mapping[Mesh, float] = field(default_factory=dict)

    def learn(self, mesh: Mesh, least: float) -> None:
        """No layouts on a mesh take less than that."""
        self.least[mesh] = max(0.0, least, self.least.get(mesh, 0.0))

    def keep(self, seconds: float) -> None:
        """Let go of the graphs on which everything takes far longer than that."""
        for mesh, least in self.least.items():
            if least > _FAR * seconds:
                self.graphs.pop(mesh, None)


@dataclass
class LayoutSearch:
    """The search for the layouts of one program: what it is asked, and the best mesh so far."""

    captured: Captured
    cluster: Cluster
    constraints: Callable[[Mesh], Constraints]
    memory: float | None = None  # bytes that a plan may need on each device
    microbatches: int = 1  # `captured` is the program of one of these
    states: States = WHOLE  # how those of parameters are cut
    cutoff: float = math.inf  # seconds of a step: what takes so long is not looked for
    # Tells the bytes that the finished program needs: the last word on what fits. The result has
    # the very decisions that it was asked about, if it was.
    finished: Callable[[Decisions], float] | None = None
    report: Report = lambda phase, detail: None
    known: SearchCache = field(default_factory=SearchCache)
    _best: _MeshSolution | None = None
    _bound: float = math.inf  # the least of all meshes that were weighed
    _considered: list[ConsideredMesh] = field(default_factory=list)
    _smallest: SmallestFootprint | None = None  # when nothing fits
    _is_beaten: bool = False  # some mesh was not the best
    _is_interrupted: bool = False  # by Ctrl-C, or since time is over
    _told: str = ""  # the mesh that is looked at

    def run(self, meshes: Sequence[Mesh]) -> SearchResult:
        """The fastest plan over all `meshes` that keeps to the memory."""
        started = time.perf_counter()
        left = self._weigh_all(meshes)
        if self._best is None:
            if self._is_interrupted:
                raise nothing_found_yet()
            if self._is_beaten:
                raise NothingFaster
            assert self._smallest is not None
            assert self.memory is not None
            raise NothingFits.of(self.memory, self._smallest)
        solution, count = self._best.solution, self.microbatches
        self.known.keep(solution.objective)
        bound = min(self._bound, solution.objective)
        account = SearchReport(
            seconds=time.perf_counter() - started,
            objective=solution.objective * count,
            added_up=solution.objective * count,
            bound=bound * count,
            gap=relative_gap(solution.objective, bound),
            sizes=solution.sizes,
            considered=tuple(self._considered),
            interrupted=self._is_interrupted,
            multiplier=solution.multiplier,
        )
        account = account.cut_short() if left else account
        return SearchResult(self._best.decisions, account, self._best.memory)

    def _weigh_all(self, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
        """The meshes that were left, if it ended early. Those come first of which most is
        known: what they take at least, the best of them first. Of many axes, the last, which is
        inside of nodes, is best split up."""
        known = sorted((mesh for mesh in meshes if self._is_known(mesh)), key=self._least)
        others = [mesh for mesh in meshes if mesh not in known]
        others.sort(key=lambda mesh: (len(mesh.names), mesh.shape[-1] * (len(mesh.names) > 2)))
        meshes = [*known, *others]
        for number, mesh in enumerate(meshes):
            left = meshes[number + 1 :]
            try:
                self._told = f"{number + 1} of {len(meshes)}: {mesh}"
                self.report("mesh", self._told)
                if why := self._why_not(mesh, meshes):
                    self._considered.append(ConsideredMesh(mesh, None, None, why))
                    continue
                self._weigh(mesh)
            except OutOfTime:
                if self._best is None:
                    raise
                self._is_interrupted, left = True, meshes[number:]
            except (KeyboardInterrupt, Interrupted):
                self._is_interrupted, left = True, meshes[number:]
            if self._is_interrupted:
                why = "the search ended before"
                self._considered += [ConsideredMesh(m, None, None, why) for m in left]
                return left
        return ()

    def _why_not(self, mesh: Mesh, meshes: Sequence[Mesh]) -> str:
        """Why a mesh is not tried, if it is not: all of a kind are if they are few, else those that
        split good ones."""
        axes, is_small = len(mesh.names), not is_large(self.captured)
        most = MOST_OF_A_KIND if is_small or axes < 3 else MOST_SPLIT
        is_one_of_few = sum(len(other.names) == axes for other in meshes) <= most
        tried = [c for c in self._considered if len(c.mesh.names) == axes - 1]
        if self._is_known(mesh) or is_one_of_few or not tried:
            return ""
        # Of those that do not fit, the ones that nearly do.
        tried.sort(key=lambda c: (c.seconds is None, c.seconds or c.memory or math.inf))
        is_by_time = not is_small and tried[0].seconds is not None
        split = [c for c in tried[: 1 if is_by_time else MOST_SPLIT] if _split_at(mesh, c.mesh)]
        if not split:
            return "splits no axis of the best meshes with fewer axes"
        return self._gains_nothing(mesh, split[0]) if is_by_time else ""

    def _gains_nothing(self, mesh: Mesh, coarse: ConsideredMesh) -> str:
        """Why a large program is not likely to be faster with an axis of `coarse` split, the best
        there is: the last axis brought nothing, or another way to split the same did not, or
        another way to split any did."""
        taken, left = coarse.seconds or 0.0, 1 - _GAIN
        if taken > self._fastest(len(coarse.mesh.names) - 1) * left:
            return f"an axis less takes {_GAIN:.1%} more at most"
        at = _split_at(mesh, coarse.mesh)
        for found in self._considered:
            if found.seconds is None or not (split := _split_at(found.mesh, coarse.mesh)):
                continue
            if found.seconds < taken * left:
                return f"{found.mesh} is as good a split: it gains more than {_GAIN:.1%}"
            if split == at:
                return f"{found.mesh}, which splits the same axis, gains less than {_GAIN:.1%}"
        return ""

    def _fastest(self, axes: int) -> float:
        """The seconds on the best mesh of so many axes."""
        found = (c.seconds for c in self._considered if len(c.mesh.names) == axes)
        return min((taken for taken in found if taken is not None), default=math.inf)

    def _weigh(self, mesh: Mesh) -> None:
        """Solve one mesh, unless it cannot be the best; keep it if it is."""
        so_far = self._objective
        if (least := self._least(mesh)) >= so_far * self._part:
            self._leave_out(mesh, least, "takes at least that", least)
            return
        if self._is_unlikely(mesh):
            self._leave_out(mesh, least, "takes longer in larger micro-batches", least)
            return
        if (built := self._built(mesh)) is None:
            return
        try:
            solved = self._fitting(built)
        except NoRoom:
            least, choice = least_memory(built.graph)
            least += built.fixed_bytes
            if self._smallest is None or least < self._smallest.memory:
                states, how = _states(built, choice), str(mesh)
                needs = how, mesh.size, least, states, self.microbatches
                self._smallest = SmallestFootprint(*needs, is_bound=True)
            why = f"needs at least {bytes_text(least, 4)}"
            self._considered.append(ConsideredMesh(mesh, None, least, why))
            return
        solution = solved.solution
        if solution.bound >= so_far:
            bound = solution.bound
            self._leave_out(mesh, bound - built.slack, "takes at least that", bound)
            return
        seconds = solution.objective * self.microbatches
        self._considered.append(ConsideredMesh(mesh, seconds, solved.memory))
        if solution.objective < so_far * (1 - _TIE):
            self._best = solved
        self._is_beaten = True

    def _is_known(self, mesh: Mesh) -> bool:
        return mesh in self.known.least or mesh in self.known.fewer

    def _least(self, mesh: Mesh) -> float:
        """The seconds of a micro-batch that are known to be the least on a mesh."""
        fewer = self.known.fewer.get(mesh, 0.0) / self.microbatches
        return max(self.known.least.get(mesh, 0.0), fewer)

    def _is_unlikely(self, mesh: Mesh) -> bool:
        """Whether it is guessed that a mesh is not faster than the best so far: it is not in larger
        micro-batches, in which the best takes about as long as now."""
        if self._best is None or not is_large(self.captured) or self._is_limited:
            return False
        fewer, best = self.known.fewer, self._best.built.mesh
        taken = self._best.solution.objective * self.microbatches
        known = fewer.get(best, 0.0)
        return mesh in fewer and known <= fewer[mesh] and taken <= known * (1 + _ALIKE)

    def _leave_out(self, mesh: Mesh, bound: float, why: str, seconds: float | None = None) -> None:
        """A mesh on which nothing is faster than the best so far, and nothing below `bound`."""
        self._is_beaten = True
        taken = None if seconds is None else seconds * self.microbatches
        self._considered.append(ConsideredMesh(mesh, taken, None, why))
        self._cannot_beat(bound)

    def _built(self, mesh: Mesh) -> MeshCostGraph | None:
        """The cost graph on a mesh, unless its operators alone take too long."""
        graphs, so_far = self.known.graphs, self._objective
        builder, built = None, graphs.get(mesh)
        if built is None:
            self.report("mesh", f"{self._told}, pricing operators")
            about = self.captured, mesh, self.cluster, self.constraints(mesh), self.microbatches
            builder = CostGraphBuilder(*about, self.states)
            built = builder.built
        if built.alone >= so_far:
            why = f"its operators alone take {seconds_text(built.alone * self.microbatches)}"
            self.known.learn(mesh, built.alone - built.slack)
            self._leave_out(mesh, built.alone - built.slack, why)
            return None
        if builder is not None:
            graphs[mesh] = builder.run()
        return built

    def _fitting(self, built: MeshCostGraph) -> _MeshSolution:
        """The best solution whose finished program fits; an error if there is none."""
        limit = None if self.memory is None else self.memory - built.fixed_bytes
        found = self._solved(built, limit)
        bound = found.solution.bound
        self._cannot_beat(max(bound - built.slack, self._least(built.mesh)))
        if limit is None or self.finished is None:
            return found
        is_many = is_large(self.captured)
        is_sure = is_many and found.solution.memory <= _SURE * limit
        if is_sure or found.solution.objective >= self._objective:
            return found
        fitting, fits, over = self._tightened(built, found, limit)
        if fits == limit or is_many:
            return fitting
        return self._widened(built, fitting, (fits, over), bound)

    def _solved(
        self, built: MeshCostGraph, limit: float | None, last: _MeshSolution | None = None
    ) -> _MeshSolution:
        """The best solution; `last`: that under a limit near this one, or on another mesh."""
        last = last or self._best
        guess = 0.0 if last is None else last.solution.multiplier
        how = {"cutoff": self._objective, "multiplier": guess}
        found = solve(built.graph, limit, self._tell, **how)
        self._is_interrupted |= found.interrupted
        if limit is None or limit == math.inf:
            self.known.learn(built.mesh, found.bound - built.slack)
        return _MeshSolution(built, found)

    def _tell(self, phase: str, detail: str) -> None:
        """What a solution is at, in words of layouts."""
        doing = f"layouts that fit, {detail}" if phase == "memory" else "layouts"
        self.report("mesh", f"{self._told}, {doing}")

    def _needed(self, found: _MeshSolution) -> float:
        """The bytes of the finished program."""
        assert self.finished is not None
        return self.finished(found.decisions)

    def _tightened(
        self, built: MeshCostGraph, found: _MeshSolution, limit: float
    ) -> tuple[_MeshSolution, float, float]:
        """The first solution whose finished program fits, as the limit of the search is lowered, or
        the one that it adds up least for; the limit under which it was found, and one that was too
        high."""
        assert self.memory is not None
        over = math.inf
        for left in reversed(range(_TIGHTENED)):
            needed = self._needed(found)
            if needed <= self.memory:
                return found, limit, over
            if self._is_interrupted:
                raise nothing_found_yet()
            if not left:
                break
            over = min(over, limit, found.solution.memory)
            limit = over - (needed - self.memory)
            try:
                found = self._solved(built, limit, found)
            except NoRoom:
                # So low a limit may be below what any layouts add up, where finished programs add
                # less: those that add up least may fit. Large programs have other ways to.
                least = least_limit(built.graph)
                if over <= least or is_large(self.captured):
                    break
                found, limit = self._solved(built, least, found), least
        rule, remedy = "the finished program fits into memory", "more memory"
        raise NoRoom(rule, got=bytes_text(needed, 4), remedy=remedy)

    def _widened(
        self, built: MeshCostGraph, best: _MeshSolution, limits: tuple[float, float], bound: float
    ) -> _MeshSolution:
        """A solution that fits, or a better one: what lies between the limit under which it was
        found and one that is too high may be faster."""
        assert self.memory is not None
        fits, over = limits
        for _ in range(_WIDENED):
            if self._is_interrupted or relative_gap(best.solution.objective, bound) <= _CLOSE:
                break
            limit = (fits + over) / 2
            found = self._solved(built, limit, best)
            if self._needed(found) > self.memory:
                over = min(limit, found.solution.memory)
                continue
            fits = limit
            if found.solution.objective < best.solution.objective:
                best = found
        return best

    @property
    def _objective(self) -> float:
        """The seconds of a micro-batch that are to be beaten."""
        known = self.cutoff / self.microbatches
        return known if self._best is None else min(known, self._best.solution.objective)

    @property
    def _part(self) -> float:
        """The part of that which has to be beaten."""
        return 1 - _SPARE if self._is_limited and is_large(self.captured) else 1.0

    @property
    def _is_limited(self) -> bool:
        return self.memory is not None and self.memory < math.inf

    def _cannot_beat(self, bound: float) -> None:
        """No plan on some mesh is below `bound`: that of its graph, less what a cut prologue would
        save."""
        self._bound = min(self._bound, max(0.0, bound))


def is_large(captured: Captured) -> bool:
    """Whether a program has so many calls that some of what is weighed is left out by a guess."""
    return captured.length > _SMALL


class NothingFaster(Exception):
    """No layouts take less than a search was told to beat."""


class OutOfTime(Exception):
    """A search is to end with what it has."""


def nothing_found_yet() -> Interrupted:
    """The error of a search that was interrupted with nothing to show."""
    return Interrupted(
        "a search runs until it has found a plan",
        got="an interrupt before the first one was found",
        remedy="let it run longer, or give it a mesh",
    )


def _split_at(mesh: Mesh, coarse: Mesh) -> int:
    """Which axis of `coarse`, the first being 1, split in two gives `mesh`; 0: none."""
    sizes = mesh.shape
    for at in range(len(sizes) - 1):
        if (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]) == coarse.shape:
            return at + 1
    return 0


def _states(built: MeshCostGraph, choice: Sequence[int]) -> float:
    """The bytes of parameters with gradients and optimizer states."""
    tables, _, numbers, _ = built.graph.tables()
    found = 0.0
    for node in built.captured.graph.find_nodes(op="placeholder"):
        if (variable := built.parameters.get(node.name)) is not None:
            memory = tables[numbers[variable.number]].memory
            if memory is not None:
                found += float(memory[choice[variable.number]]) * info(node).times
    return found
