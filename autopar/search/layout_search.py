"""Layout search: the fastest mesh for one captured model, and every layout on it.

Each candidate mesh gets its cost graph and its exact optimum. A mesh whose operators alone, without
any movement, already take longer than the best plan so far is not solved. If there are many meshes
with one number of axes, only those are solved that split an axis of one of the best with fewer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.errors import Interrupted
from autopar.mesh import Mesh
from autopar.search.constraints import Constraints
from autopar.search.cost_graph_builder import CostGraphBuilder, MeshCostGraph
from autopar.search.decisions import Decisions
from autopar.search.mesh_choice import reason_to_skip
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

MAX_LOWERED_LIMITS = 6  # tries with a lower limit until the finished program fits
MAX_RAISED_LIMITS = 2  # tries with a higher limit after one fits
GOOD_ENOUGH_GAP = 0.01  # relative, to the bound: below it nothing better is searched for
LARGE_PROGRAM = 500  # operators above which guesses replace some solves
SAFE_SHARE = 0.7  # large programs below this share of the limit are not checked
DROP_GRAPH_ABOVE = 1.25  # times the best seconds: graphs of slower meshes are dropped
_TIE = 1e-6  # relative: of meshes that are as good, the one with fewer axes is taken
# For large programs, relative:
SIMILAR_SECONDS = 0.05  # slower by less in smaller micro-batches, a mesh is as good as before
MIN_GAIN_UNDER_LIMIT = 0.0025  # under a limit, a mesh that may save less is not solved


@dataclass(frozen=True)
class SearchResult:
    """Hold layouts for a program; with the report of the search, if they were searched for."""

    decisions: Decisions
    report: SearchReport | None = None
    memory: float = 0.0  # bytes on each device, as the search adds them up


@dataclass(frozen=True)
class _MeshSolution:
    """Hold the best plan on one mesh."""

    cost_graph: MeshCostGraph
    solution: Solution

    @cached_property
    def decisions(self) -> Decisions:
        """Return the layouts of the solution."""
        return decide(self.cost_graph, self.solution.choice)

    @property
    def memory(self) -> float:
        """Return the bytes on each device, as the search adds them up."""
        return self.solution.memory + self.cost_graph.fixed_bytes


class _FittingSolution(NamedTuple):
    """Hold a solution whose finished program fits, with limits of the search that bracket it."""

    solved: _MeshSolution
    limit: float  # under which it was found
    too_high: float  # a limit whose solution did not fit


@dataclass(frozen=True)
class SearchCache:
    """Keep what is known of one program, with its constraints and states, between searches."""

    graphs: dict[Mesh, MeshCostGraph] = field(default_factory=dict)
    # Those that count the bytes of the other moment.
    others: dict[Mesh, MeshCostGraph] = field(default_factory=dict)
    least: dict[Mesh, float] = field(default_factory=dict)  # seconds, whatever memory it takes
    # Seconds of a step in larger micro-batches, with which none takes longer.
    seconds_in_larger_microbatches: Mapping[Mesh, float] = field(default_factory=dict)

    def learn(self, mesh: Mesh, least: float) -> None:
        """Note that no layouts on a mesh take less than `least` seconds."""
        self.least[mesh] = max(0.0, least, self.least.get(mesh, 0.0))

    def keep(self, seconds: float) -> None:
        """Drop the graphs on which everything takes far longer than `seconds`."""
        for mesh, least in self.least.items():
            if least > DROP_GRAPH_ABOVE * seconds:
                self.graphs.pop(mesh, None)
                self.others.pop(mesh, None)


@dataclass
class LayoutSearch:
    """Search the layouts of one program on one mesh after another; keep the best so far."""

    captured: Captured
    cluster: Cluster
    constraints: Callable[[Mesh], Constraints]
    memory: float | None = None  # bytes that a plan may need on each device
    microbatches: int = 1  # `captured` is the program of one of these
    states: States = WHOLE  # how the states of parameters are cut
    cutoff: float = math.inf  # seconds of a step: slower plans are not searched for
    # Returns the bytes that the finished program needs: the last word on what fits. It was called
    # with the very decisions of the result, if at all.
    finished_bytes: Callable[[Decisions], float] | None = None
    report: Report = lambda phase, detail: None
    known: SearchCache = field(default_factory=SearchCache)
    _best: _MeshSolution | None = None
    _bound: float = math.inf  # the least of all meshes that were weighed
    _considered: list[ConsideredMesh] = field(default_factory=list)
    _smallest: SmallestFootprint | None = None  # when nothing fits
    _is_beaten: bool = False  # some mesh was not the best
    _is_interrupted: bool = False  # by Ctrl-C, or since time is over
    _progress: str = ""  # the mesh that is being weighed

    def run(self, meshes: Sequence[Mesh]) -> SearchResult:
        """Return the fastest plan over all `meshes` that keeps to the memory."""
        started = time.perf_counter()
        remaining = self._weigh_all(meshes)
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
        report = SearchReport(
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
        report = report.cut_short() if remaining else report
        return SearchResult(self._best.decisions, report, self._best.memory)

    def _weigh_all(self, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
        """Weigh the meshes, and return those that remained if it ended early.
        Meshes with known bounds come first, the best of them first. Of many axes, the last, which
        is inside of nodes, is best split up."""
        known_meshes = sorted((mesh for mesh in meshes if self._is_known(mesh)), key=self._least)
        new_meshes = [mesh for mesh in meshes if mesh not in known_meshes]
        new_meshes.sort(key=lambda mesh: (len(mesh.names), mesh.shape[-1] * (len(mesh.names) > 2)))
        meshes = [*known_meshes, *new_meshes]
        for number, mesh in enumerate(meshes):
            remaining = meshes[number + 1 :]
            try:
                self._progress = f"{number + 1} of {len(meshes)}: {mesh}"
                self.report("mesh", self._progress)
                is_small = not is_large(self.captured)
                reason = reason_to_skip(mesh, meshes, self._considered, is_small=is_small)
                if reason and not self._is_known(mesh):
                    self._considered.append(ConsideredMesh(mesh, None, None, reason))
                    continue
                self._weigh(mesh)
            except DeadlinePassed:
                if self._best is None:
                    raise
                self._is_interrupted, remaining = True, meshes[number:]
            except (KeyboardInterrupt, Interrupted):
                self._is_interrupted, remaining = True, meshes[number:]
            if self._is_interrupted:
                why = "the search ended before"
                self._considered += [ConsideredMesh(m, None, None, why) for m in remaining]
                return remaining
        return ()

    def _weigh(self, mesh: Mesh) -> None:
        """Solve one mesh, unless it cannot be the best; keep it if it is."""
        best_seconds = self._seconds_to_beat
        if (least := self._least(mesh)) >= best_seconds * self._required_ratio:
            self._leave_out(mesh, least, "takes at least that", least)
            return
        if self._is_unlikely(mesh):
            self._leave_out(mesh, least, "takes longer in larger micro-batches", least)
            return
        if (cost_graph := self._priced_graph(mesh)) is None:
            return
        try:
            solved = self._fitting(cost_graph)
        except NoRoom:
            least, choice = least_memory(cost_graph.graph)
            least += cost_graph.fixed_bytes
            if self._smallest is None or least < self._smallest.memory:
                self._smallest = SmallestFootprint(
                    how=str(mesh),
                    devices=mesh.size,
                    memory=least,
                    states=_states(cost_graph, choice),
                    microbatches=self.microbatches,
                    is_bound=True,
                )
            reason = f"needs at least {bytes_text(least, 4)}"
            self._considered.append(ConsideredMesh(mesh, None, least, reason))
            return
        solution = solved.solution
        if solution.bound >= best_seconds:
            bound = solution.bound
            self._leave_out(mesh, bound - cost_graph.slack, "takes at least that", bound)
            return
        seconds = solution.objective * self.microbatches
        self._considered.append(ConsideredMesh(mesh, seconds, solved.memory))
        if solution.objective < best_seconds * (1 - _TIE):
            self._best = solved
        self._is_beaten = True

    def _is_known(self, mesh: Mesh) -> bool:
        return mesh in self.known.least or mesh in self.known.seconds_in_larger_microbatches

    def _least(self, mesh: Mesh) -> float:
        """Return the least seconds of a micro-batch that are known for a mesh."""
        step_seconds = self.known.seconds_in_larger_microbatches.get(mesh, 0.0)
        return max(self.known.least.get(mesh, 0.0), step_seconds / self.microbatches)

    def _is_unlikely(self, mesh: Mesh) -> bool:
        """Return whether a mesh is probably not faster than the best so far.
        That is guessed if it is not in larger micro-batches, in which the best takes about as
        long."""
        if self._best is None or not is_large(self.captured) or self._is_limited:
            return False
        fewer, best = self.known.seconds_in_larger_microbatches, self._best.cost_graph.mesh
        seconds = self._best.solution.objective * self.microbatches
        known_seconds = fewer.get(best, 0.0)
        return (
            mesh in fewer
            and known_seconds <= fewer[mesh]
            and seconds <= known_seconds * (1 + SIMILAR_SECONDS)
        )

    def _leave_out(
        self, mesh: Mesh, bound: float, reason: str, seconds: float | None = None
    ) -> None:
        """Record a mesh on which no plan is faster than the best so far, or below `bound`."""
        self._is_beaten = True
        step_seconds = None if seconds is None else seconds * self.microbatches
        self._considered.append(ConsideredMesh(mesh, step_seconds, None, reason))
        self._cannot_beat(bound)

    def _priced_graph(self, mesh: Mesh) -> MeshCostGraph | None:
        """Return the cost graph on a mesh; `None` if its operators alone take too long."""
        graphs, best_seconds = self.known.graphs, self._seconds_to_beat
        builder, cost_graph = None, graphs.get(mesh)
        if cost_graph is None:
            self.report("mesh", f"{self._progress}, pricing operators")
            builder = self._builder(mesh)
            cost_graph = builder.built
        if cost_graph.alone >= best_seconds:
            step_seconds = seconds_text(cost_graph.alone * self.microbatches)
            reason = f"its operators alone take {step_seconds}"
            self.known.learn(mesh, cost_graph.alone - cost_graph.slack)
            self._leave_out(mesh, cost_graph.alone - cost_graph.slack, reason)
            return None
        if builder is not None:
            graphs[mesh] = builder.run()
        return cost_graph

    def _builder(self, mesh: Mesh, *, at_other_moment: bool = False) -> CostGraphBuilder:
        """Return what builds the cost graph on a mesh, its operators priced."""
        return CostGraphBuilder(
            self.captured,
            mesh,
            self.cluster,
            self.constraints(mesh),
            self.microbatches,
            self.states,
            at_other_moment=at_other_moment,
        )

    def _fitting(self, cost_graph: MeshCostGraph) -> _MeshSolution:
        """Return the best solution whose finished program fits; raise `NoRoom` if there is none."""
        limit = None if self.memory is None else self.memory - cost_graph.fixed_bytes
        solved, needed = self._solved(cost_graph, limit), None
        if limit is not None and self._has_to_be_finished(solved, limit):
            needed = self._needed(solved)
            if self._is_too_large(needed) and self.microbatches == 1:
                other = self._solved(self._at_other_moment(cost_graph.mesh), limit, solved)
                if other.solution.bound > solved.solution.bound:
                    solved, needed = other, self._needed(other)
        bound = solved.solution.bound
        self._cannot_beat(max(bound - cost_graph.slack, self._least(cost_graph.mesh)))
        if limit is None or needed is None:
            return solved
        fitting = self._tightened(solved, limit, needed)
        if fitting.limit == limit or is_large(self.captured):
            return fitting.solved
        return self._widened(fitting, bound)

    def _has_to_be_finished(self, solved: _MeshSolution, limit: float) -> bool:
        """Return whether only the finished program tells whether a solution fits."""
        is_sure = is_large(self.captured) and solved.solution.memory <= SAFE_SHARE * limit
        is_beaten = solved.solution.objective >= self._seconds_to_beat
        return self.finished_bytes is not None and not is_sure and not is_beaten

    def _at_other_moment(self, mesh: Mesh) -> MeshCostGraph:
        """Return the graph that counts gradients where the first counts activations, or the other
        way round. What fits is within the limit at both moments."""
        if mesh not in self.known.others:
            self.known.others[mesh] = self._builder(mesh, at_other_moment=True).run()
        return self.known.others[mesh]

    def _is_too_large(self, needed: float) -> bool:
        return self.memory is not None and needed > self.memory and not self._is_interrupted

    def _solved(
        self, cost_graph: MeshCostGraph, limit: float | None, similar: _MeshSolution | None = None
    ) -> _MeshSolution:
        """Return the best solution; `similar`: that under another limit or on another mesh."""
        similar = similar or self._best
        guess = 0.0 if similar is None else similar.solution.multiplier
        options = {"cutoff": self._seconds_to_beat, "multiplier": guess}
        solution = solve(cost_graph.graph, limit, self._tell, **options)
        self._is_interrupted |= solution.interrupted
        if limit is None or limit == math.inf:
            self.known.learn(cost_graph.mesh, solution.bound - cost_graph.slack)
        return _MeshSolution(cost_graph, solution)

    def _tell(self, phase: str, detail: str) -> None:
        """Report the progress of a solution in words of layouts."""
        phase_text = f"layouts that fit, {detail}" if phase == "memory" else "layouts"
        self.report("mesh", f"{self._progress}, {phase_text}")

    def _needed(self, solved: _MeshSolution) -> float:
        """Return the bytes of the finished program."""
        assert self.finished_bytes is not None
        return self.finished_bytes(solved.decisions)

    def _tightened(self, solved: _MeshSolution, limit: float, needed: float) -> _FittingSolution:
        """Return the first solution whose finished program fits, as the search's limit is lowered.
        `needed`: the bytes of the first one's. Raise `NoRoom` if there is none."""
        assert self.memory is not None
        cost_graph, too_high = solved.cost_graph, math.inf
        for tries_left in reversed(range(MAX_LOWERED_LIMITS)):
            if needed <= self.memory:
                return _FittingSolution(solved, limit, too_high)
            if self._is_interrupted:
                raise nothing_found_yet()
            if not tries_left:
                break
            too_high = min(too_high, limit, solved.solution.memory)
            limit = too_high - (needed - self.memory)
            try:
                solved = self._solved(cost_graph, limit, solved)
            except NoRoom:
                # The search may count more bytes than the finished program needs, so that a limit
                # below its least is possible. Large programs have other ways to fit.
                least = least_limit(cost_graph.graph)
                if too_high <= least or is_large(self.captured):
                    break
                solved, limit = self._solved(cost_graph, least, solved), least
            needed = self._needed(solved)
        rule, remedy = "the finished program fits into memory", "more memory"
        raise NoRoom(rule, got=bytes_text(needed, 4), remedy=remedy)

    def _widened(self, fitting: _FittingSolution, bound: float) -> _MeshSolution:
        """Return the fitting solution, or a faster one under a limit between its two limits."""
        assert self.memory is not None
        best, fits, too_high = fitting
        for _ in range(MAX_RAISED_LIMITS):
            gap = relative_gap(best.solution.objective, bound)
            if self._is_interrupted or gap <= GOOD_ENOUGH_GAP:
                break
            limit = (fits + too_high) / 2
            solved = self._solved(best.cost_graph, limit, best)
            if self._needed(solved) > self.memory:
                too_high = min(limit, solved.solution.memory)
                continue
            fits = limit
            if solved.solution.objective < best.solution.objective:
                best = solved
        return best

    @property
    def _seconds_to_beat(self) -> float:
        """Return the seconds of a micro-batch that are to be beaten."""
        cutoff = self.cutoff / self.microbatches
        return cutoff if self._best is None else min(cutoff, self._best.solution.objective)

    @property
    def _required_ratio(self) -> float:
        """Return the part of the objective that has to be beaten."""
        return 1 - MIN_GAIN_UNDER_LIMIT if self._is_limited and is_large(self.captured) else 1.0

    @property
    def _is_limited(self) -> bool:
        return self.memory is not None and self.memory < math.inf

    def _cannot_beat(self, bound: float) -> None:
        """Note that no plan on some mesh is below `bound` seconds.
        That is the bound of its graph, less what a cut prologue would save."""
        self._bound = min(self._bound, max(0.0, bound))


def is_large(captured: Captured) -> bool:
    """Return whether a program has so many calls that some weighing is replaced by guesses."""
    return captured.length > LARGE_PROGRAM


class NothingFaster(Exception):
    """Signal that no layouts take less than the cutoff of a search."""


class DeadlinePassed(Exception):
    """Signal that the deadline of a search has passed: it ends with what it has."""


def nothing_found_yet() -> Interrupted:
    """Return the error of a search that was interrupted before it found a plan."""
    return Interrupted(
        "a search runs until it has found a plan",
        got="an interrupt before the first one was found",
        remedy="let it run longer, or give it a mesh",
    )


def _states(cost_graph: MeshCostGraph, choice: Sequence[int]) -> float:
    """Return the bytes of parameters with gradients and optimizer states."""
    graph = cost_graph.graph.tables()
    total = 0.0
    for node in cost_graph.captured.graph.find_nodes(op="placeholder"):
        if (variable := cost_graph.parameters.get(node.name)) is not None:
            memory = graph.node_tables[graph.nodes[variable.number]].memory
            if memory is not None:
                total += float(memory[choice[variable.number]]) * info(node).count
    return total
