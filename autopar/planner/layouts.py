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
from autopar.candidates.lengthened import longer
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
from autopar.states import WHOLE, States, split_for
from autopar.text.progress import Report

MOST_BUILT = 3  # programs whose cost graphs are kept
LESS = 0.9  # of a limit: few layouts are in between
MOST_LEANER = 3  # layouts that are looked at for replicas, each with so much of the last limit
UNEQUAL = 1e-4  # relative: what blocks may lose by being equal


@dataclass(frozen=True)
class LayoutRequest:
    """What is asked of the layouts of one program."""

    captured: Captured
    batches: Microbatches | None  # `captured` is then the program of one micro-batch
    offered: Sequence[Mesh]  # to choose from
    memory: float  # bytes on each device
    is_all: bool  # devices hold no more than this program
    states: States = WHOLE
    # The regions that run again in backward.
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    cutoff: float = math.inf  # seconds of a step: layouts that take so long are not wanted
    batch_axis: str = ""  # of the mesh that is offered: it cuts the batch
    line: PipelineLine | None = None  # the places of a pipeline; the mesh is inside each

    def machines(self, cluster: Cluster) -> Cluster:
        """What layouts are chosen for: no place of a pipeline is faster."""
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
    # What meshes take at least, by what was asked and the micro-batches.
    _least: dict[tuple[object, ...], dict[int, dict[Mesh, float]]] = field(default_factory=dict)

    def find(self, asked: LayoutRequest) -> tuple[Candidate, float]:
        """The program with its layouts and states, and the bytes that the search found.

        Where the parts of states are fewer than the ranks of an axis that they are cut over, this
        is on the mesh with that axis split. Under a limit the layouts of equal blocks may have to
        differ: then it is of the whole program, but for that of a pipeline, whose stages share out
        another limit.
        """
        found, memory = self._of_program(asked)
        search, whole = found.search, self.whole
        if whole is None or asked.captured.times == 1 or search is None:
            return found, memory
        is_free = asked.memory == math.inf or not asked.is_all
        if is_free or search.gap <= UNEQUAL or search.bound >= asked.cutoff:
            return found, memory
        program, batches = whole.program(asked.batches)
        decided = whole.recomputed(asked.recompute)
        unshortened = replace(asked, captured=program, batches=batches, recompute=decided)
        return self._of_program(unshortened)

    def with_whole_states(self, asked: LayoutRequest) -> Candidate:
        """The layouts that are the best with whole states. With those that were asked for, none
        takes less than the best with these."""
        (own, _), (whole, _) = self.find(asked), self.find(replace(asked, states=WHOLE))
        if own.search is None or whole.search is None:
            return whole
        return whole.changed(whole.search.lowered(own.search.bound))

    def _of_program(self, asked: LayoutRequest) -> tuple[Candidate, float]:
        while True:
            found, memory = self._found(asked)
            if asked.states.is_whole:
                return found.placed(asked.states), memory
            graph, mesh = found.rewritten, found.mesh
            if self._lacks_replicas(asked, graph, mesh):
                found, memory = self._with_replicas(asked, found, memory)
                graph, mesh = found.rewritten, found.mesh
            try:
                split = split_for(asked.states, main_axes(graph, mesh), mesh)
            except InvalidInput:
                others = [other for other in asked.offered if other != mesh]
                if not others:
                    raise
                asked = replace(asked, offered=others)
                continue
            if split is None:
                break
            asked = replace(asked, offered=[mesh.split(*split)])
        if self.request.states is not None:
            annotated = self.constraints(asked.captured, asked.recompute, mesh).parameters
            require_agreement(asked.states, annotated, main_axes(graph, mesh), mesh)
            require_something_to_cut(graph, asked.states, mesh)
        return found.placed(asked.states), memory

    def _lacks_replicas(self, asked: LayoutRequest, graph: fx.Graph, mesh: Mesh) -> bool:
        """Whether states that were asked for by name are to be cut, and there is nothing to cut."""
        asked_for = self.request.mode == "auto" and self.request.states is not None
        return asked_for and not has_something_to_cut(graph, asked.states, mesh)

    def _with_replicas(
        self, asked: LayoutRequest, best: Candidate, memory: float
    ) -> tuple[Candidate, float]:
        """The fastest layouts in which some axis cuts the batch, or that take less memory than the
        `best` and have replicas; an error, if some were refused, else the `best`."""
        ways: list[tuple[Candidate, float]] = []
        refused: list[Exception] = []

        def keep(laid: Candidate, memory: float) -> None:
            if not self._lacks_replicas(asked, laid.rewritten, laid.mesh):
                ways.append((laid, memory))

        last = best
        for _ in range(MOST_LEANER if asked.is_all else 0):
            limit = LESS * last.placed(asked.states).memory.peak
            with suppress(NothingFits, NothingFaster):
                last, size = self._found(replace(asked, memory=limit))
                keep(last, size)
        for mesh in asked.offered:
            named = self.constraints(asked.captured, asked.recompute, mesh).axes
            for axis in [axis for axis in mesh if mesh[axis] > 1 and axis not in named]:
                try:
                    keep(*self._found(replace(asked, offered=[mesh], batch_axis=axis)))
                except (NothingFits, NothingFaster) as error:
                    refused.append(error)
                except InvalidInput:
                    pass  # the batch is too small
        if not ways:
            if refused:
                raise refused[0]
            return best, memory
        found, memory = min(ways, key=lambda way: way[0].placed(asked.states).cost.seconds)
        if found.search is not None and best.search is not None:
            found = found.changed(found.search.lowered(best.search.bound))
        return found, memory

    def _found(self, asked: LayoutRequest) -> tuple[Candidate, float]:
        """With states that are whole yet. What was asked before is known: layouts without a limit
        are the start of several ways to save memory, and the answer if they fit."""
        regions = tuple(sorted(asked.recompute.items()))
        about = asked.batch_axis, asked.is_all, asked.states, regions, asked.line
        key = id(asked.captured), tuple(asked.offered), *about
        if (free := self._known.get((*key, math.inf))) and self._keeps_to(free, asked):
            return free
        # What was found is the best whatever was to be beaten.
        if (*key, asked.memory) not in self._known:
            self._known[*key, asked.memory] = self._searched(asked)
        return self._known[*key, asked.memory]

    def _graphs(self, asked: LayoutRequest) -> SearchCache:
        """The cost graphs of a program, which is looked at under several limits: those that take
        longest to build stay."""
        regions = tuple(sorted(asked.recompute.items()))
        key = id(asked.captured), asked.batch_axis, asked.states, regions, asked.line
        if key not in self._built:
            if len(self._built) == MOST_BUILT:
                del self._built[min(self._built, key=lambda one: _strategies(self._built[one]))]
            self._built[key] = self._known_of(asked, *key[1:])
        return self._built[key]

    def _known_of(self, asked: LayoutRequest, *about: object) -> SearchCache:
        """Of a program that was not looked at: what meshes take in a step with as many
        micro-batches, or with larger ones of which its own are parts."""
        parts = 1 if asked.batches is None else asked.batches.count
        is_short = asked.captured.times > 1
        known = self._least.setdefault((is_short, *about), {})
        fewer: dict[Mesh, float] = {}
        for count in (count for count in known if parts % count == 0):
            for mesh, seconds in known[count].items():
                fewer[mesh] = max(fewer.get(mesh, 0.0), seconds * count)
        return SearchCache(least=known.setdefault(parts, {}), seconds_in_larger_microbatches=fewer)

    def _constraints(self, asked: LayoutRequest, mesh: Mesh) -> Constraints:
        found = self.constraints(asked.captured, asked.recompute, mesh)
        axis = asked.batch_axis
        return with_batch_axis(asked.captured, mesh, axis, found) if axis else found

    def _keeps_to(self, found: tuple[Candidate, float], asked: LayoutRequest) -> bool:
        """Whether layouts that were found without a limit are what is asked for."""
        laid, memory = found
        if memory > asked.memory or (laid.search is not None and laid.search.interrupted):
            return False
        return not asked.is_all or laid.placed(asked.states).memory.peak <= asked.memory

    def _searched(self, asked: LayoutRequest) -> tuple[Candidate, float]:
        program, cluster = asked.captured, self.request.cluster
        made = partial(Candidate.laid_out, program, cluster, batches=asked.batches, line=asked.line)
        if self.request.mode != "auto":
            (mesh,) = asked.offered
            return made(decisions=propagate(program, mesh, self._constraints(asked, mesh))), 0.0
        brief = None if program.times == 1 or self.whole is None else self.whole.brief
        if brief and self.whole:
            asked = replace(asked, captured=self.whole.briefly(asked.batches))

        def candidate(decisions: Decisions) -> Candidate:
            if brief:
                decisions = longer(decisions, brief, program, asked.recompute)
            return made(decisions=decisions)

        last: list[tuple[Decisions, Candidate]] = []  # whose memory was asked for

        def needed(decisions: Decisions) -> float:
            last[:] = [(decisions, candidate(decisions))]
            return last[0][1].placed(asked.states).memory.peak

        parts = 1 if asked.batches is None else asked.batches.count
        limits = asked.memory, parts, asked.states, asked.cutoff
        machines, bound = asked.machines(cluster), partial(self._constraints, asked)
        search = LayoutSearch(asked.captured, machines, bound, *limits)
        search.known = self._graphs(asked)
        search.finished_bytes, search.report = needed if asked.is_all else None, self.report
        found = search.run(asked.offered)
        if last and last[0][0] is found.decisions:  # it is not made again
            return last[0][1].changed(found.report), found.memory
        return replace(candidate(found.decisions), search=found.report), found.memory


def _strategies(known: SearchCache) -> int:
    """Of all nodes of some cost graphs."""
    return sum(int(one.graph.packed.sizes.sum()) for one in known.graphs.values())
