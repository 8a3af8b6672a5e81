"""Layouts: where the tensors of a program live, found by search or spread from what is known.

Then the states of its parameters are cut, over the ranks that turn out to hold replicas of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from autopar.candidates.candidate import Candidate
from autopar.candidates.request import Request
from autopar.candidates.state_places import (
    has_something_to_cut,
    main_axes,
    require_agreement,
    require_something_to_cut,
)
from autopar.candidates.whole import Whole
from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import ClusterPart, PipelineLine
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import Microbatches
from autopar.recompute import Recompute
from autopar.search.constraints import Constraints
from autopar.search.decisions import Decisions
from autopar.search.layout_search import LayoutSearch, NothingFaster, SearchCache
from autopar.search.propagation import propagate, with_batch_axis
from autopar.search.smallest_footprint import NothingFits
from autopar.states import WHOLE, States, split_mesh
from autopar.text.progress import Report

MOST_BUILT = 3  # programs whose cost graphs are kept
LESS = 0.9  # of a limit: few layouts are in between
MOST_LEANER = 3  # layouts that are looked at for replicas, each with so much of the last limit
UNEQUAL = 1e-4  # relative: what blocks may lose by being equal


@dataclass(frozen=True)
class LayoutRequest:
    """A request for the layouts of one program."""

    captured: Captured
    batches: Microbatches | None  # `captured` is then the program of one micro-batch
    offered: Sequence[Mesh]  # to choose from
    memory: float  # bytes on each device
    is_unstaged: bool  # devices hold no more than this program
    states: States = WHOLE
    # The regions that run again in backward.
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    cutoff: float = math.inf  # seconds of a step: layouts that take so long are not wanted
    batch_axis: str = ""  # of the mesh that is offered: it cuts the batch
    line: PipelineLine | None = None  # the places of a pipeline; the mesh is inside each

    def machines(self, cluster: Cluster) -> Cluster:
        """Return the machines that layouts are chosen for: no place of a pipeline is faster."""
        return cluster if self.line is None else ClusterPart.of(cluster, self.line)


@dataclass(frozen=True)
class Layouts:
    """Finds layouts for the programs of one request."""

    request: Request
    constraints: Callable[[Captured, Mapping[str, Recompute], Mesh], Constraints]
    report: Report
    whole: Whole | None = None  # if it is asked for layouts of a short program
    _known: dict[tuple[object, ...], tuple[Candidate, float]] = field(default_factory=dict)
    _built: dict[tuple[object, ...], SearchCache] = field(default_factory=dict)
    # The least seconds of meshes, by request and number of micro-batches.
    _least: dict[tuple[object, ...], dict[int, dict[Mesh, float]]] = field(default_factory=dict)

    def find(self, request: LayoutRequest) -> tuple[Candidate, float]:
        """Return the program with its layouts and states, and the bytes that the search found.

        Where the parts of states are fewer than the ranks of an axis that they are cut over, this
        is on the mesh with that axis split. Under a limit the layouts of equal blocks may have to
        differ: then it is of the whole program, but for that of a pipeline, whose stages share out
        another limit.
        """
        candidate, memory = self._find_for_program(request)
        search, whole = candidate.search, self.whole
        if whole is None or not request.captured.is_folded or search is None:
            return candidate, memory
        is_free = request.memory == math.inf or not request.is_unstaged
        if is_free or search.gap <= UNEQUAL or search.bound >= request.cutoff:
            return candidate, memory
        program, batches = whole.program(request.batches)
        decided = whole.recomputed(request.recompute)
        unshortened = replace(request, captured=program, batches=batches, recompute=decided)
        return self._find_for_program(unshortened)

    def _find_for_program(self, request: LayoutRequest) -> tuple[Candidate, float]:
        while True:
            candidate, memory = self._cached_layouts(request)
            if request.states.is_whole:
                return candidate.placed(request.states), memory
            graph, mesh = candidate.rewritten, candidate.mesh
            if self._lacks_replicas(request, graph, mesh):
                candidate, memory = self._with_replicas(request, candidate, memory)
                graph, mesh = candidate.rewritten, candidate.mesh
            try:
                mesh, axes = split_mesh(request.states, main_axes(graph, mesh), mesh)
                break
            except InvalidInput:
                others = [other for other in request.offered if other != mesh]
                if not others:
                    raise
                request = replace(request, offered=others)
        if self.request.states is not None:
            annotated = self.constraints(request.captured, request.recompute, mesh).parameters
            require_agreement(request.states, annotated, axes, mesh)
            require_something_to_cut(graph, request.states, candidate.mesh)
        return candidate.placed(request.states), memory

    def _lacks_replicas(self, request: LayoutRequest, graph: fx.Graph, mesh: Mesh) -> bool:
        """Return whether states that were requested by name are to be cut, and none can be."""
        must_cut = self.request.mode == "auto" and self.request.states is not None
        return must_cut and not has_something_to_cut(graph, request.states, mesh)

    def _with_replicas(
        self, request: LayoutRequest, best: Candidate, memory: float
    ) -> tuple[Candidate, float]:
        """Return the fastest layouts in which some axis cuts the batch, or that take less memory
        than the `best` and have replicas. Raise, if all were refused; else return the `best`."""
        ways: list[tuple[Candidate, float]] = []
        refused: list[Exception] = []

        def keep(laid: Candidate, memory: float) -> None:
            if not self._lacks_replicas(request, laid.rewritten, laid.mesh):
                ways.append((laid, memory))

        last = best
        for _ in range(MOST_LEANER if request.is_unstaged else 0):
            limit = LESS * _with_states(last, request).memory.peak
            with suppress(NothingFits, NothingFaster):
                last, size = self._cached_layouts(replace(request, memory=limit))
                keep(last, size)
        for mesh in request.offered:
            named = self.constraints(request.captured, request.recompute, mesh).axes
            for axis in [axis for axis in mesh if mesh[axis] > 1 and axis not in named]:
                try:
                    keep(*self._cached_layouts(replace(request, offered=[mesh], batch_axis=axis)))
                except (NothingFits, NothingFaster) as error:
                    refused.append(error)
                except InvalidInput:
                    pass  # the batch is too small
        if not ways:
            if refused:
                raise refused[0]
            return best, memory
        fastest, memory = min(ways, key=lambda way: _with_states(way[0], request).cost.seconds)
        if fastest.search is not None and best.search is not None:
            fastest = fastest.changed(fastest.search.lowered(best.search.bound))
        return fastest, memory

    def _cached_layouts(self, request: LayoutRequest) -> tuple[Candidate, float]:
        """Return layouts with whole states, searched once for each request. Layouts without a limit
        are the start of several ways to save memory, and the answer if they fit."""
        meshes, settings = tuple(request.offered), _settings(request)
        key = id(request.captured), meshes, request.is_unstaged, *settings
        if (free := self._known.get((*key, math.inf))) and self._keeps_to(free, request):
            return free
        # The best is the same whatever was to be beaten.
        if (*key, request.memory) not in self._known:
            self._known[*key, request.memory] = self._searched(request)
        return self._known[*key, request.memory]

    def _graphs(self, request: LayoutRequest) -> SearchCache:
        """Return the cost graphs of a program, which is searched under several limits: those that
        take longest to build stay."""
        key = id(request.captured), *_settings(request)
        if key not in self._built:
            if len(self._built) == MOST_BUILT:
                del self._built[min(self._built, key=lambda k: _strategies(self._built[k]))]
            self._built[key] = self._new_cache(request, *key[1:])
        return self._built[key]

    def _new_cache(self, request: LayoutRequest, *key: object) -> SearchCache:
        """Return a cache for another program. It knows the least seconds of meshes in a step with
        as many micro-batches, or with larger ones that are cut into these."""
        parts = 1 if request.batches is None else request.batches.count
        is_short = request.captured.is_folded
        known = self._least.setdefault((is_short, *key), {})
        fewer: dict[Mesh, float] = {}
        for count in (count for count in known if parts % count == 0):
            for mesh, seconds in known[count].items():
                fewer[mesh] = max(fewer.get(mesh, 0.0), seconds * count)
        return SearchCache(least=known.setdefault(parts, {}), seconds_in_larger_microbatches=fewer)

    def _constraints(self, request: LayoutRequest, mesh: Mesh) -> Constraints:
        constraints = self.constraints(request.captured, request.recompute, mesh)
        axis = request.batch_axis
        return with_batch_axis(request.captured, mesh, axis, constraints) if axis else constraints

    def _keeps_to(self, known: tuple[Candidate, float], request: LayoutRequest) -> bool:
        """Return whether layouts that were found without a limit keep to that of a request."""
        laid, memory = known
        if memory > request.memory or (laid.search is not None and laid.search.interrupted):
            return False
        return not request.is_unstaged or _with_states(laid, request).memory.peak <= request.memory

    def _searched(self, request: LayoutRequest) -> tuple[Candidate, float]:
        program, cluster = request.captured, self.request.cluster
        lay_out = partial(
            Candidate.laid_out, program, cluster, batches=request.batches, line=request.line
        )
        if self.request.mode != "auto":
            (mesh,) = request.offered
            spread = propagate(program, mesh, self._constraints(request, mesh))
            return lay_out(decisions=spread), 0.0
        last: list[tuple[Decisions, Candidate]] = []  # whose memory was needed

        def needed(decisions: Decisions) -> float:
            last[:] = [(decisions, lay_out(decisions=decisions))]
            return _with_states(last[0][1], request).memory.peak

        parts = 1 if request.batches is None else request.batches.count
        # Axes that states split are split once layouts are known, which takes no longer.
        is_kept = request.states.keeps_mesh
        search = LayoutSearch(
            request.captured,
            request.machines(cluster),
            partial(self._constraints, request),
            request.memory,
            parts,
            request.states if is_kept else WHOLE,
            request.cutoff if is_kept else math.inf,
        )
        search.known = self._graphs(request)
        search.finished_bytes, search.report = needed if request.is_unstaged else None, self.report
        result = search.run(request.offered)
        if last and last[0][0] is result.decisions:  # it is not made again
            return last[0][1].changed(result.report), result.memory
        return replace(lay_out(decisions=result.decisions), search=result.report), result.memory


def _with_states(candidate: Candidate, request: LayoutRequest) -> Candidate:
    """Return layouts with the states of a request, as they are where these are refused: whoever
    takes such layouts says so."""
    try:
        return candidate.placed(request.states)
    except InvalidInput:
        return candidate


def _settings(request: LayoutRequest) -> tuple[object, ...]:
    """Return what the fastest layouts depend on, besides their program, meshes and limit."""
    regions = tuple(sorted(request.recompute.items()))
    return request.batch_axis, request.states, regions, request.line


def _strategies(known: SearchCache) -> int:
    """Return the number of strategies in the cost graphs of a program."""
    return sum(int(entry.graph.packed.sizes.sum()) for entry in known.graphs.values())
