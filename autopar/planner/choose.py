"""Choice: how many stages, which layouts inside them, how many micro-batches, which schedule.

Every alternative is planned by the search for its own mesh and micro-batch, cut into stages by
their predicted seconds, and priced by simulating its schedule with these, with latency and with the
sums of gradients. Where that does not fit into memory, so are stages that recompute, and stages cut
so that every rank keeps within it. The fastest one that fits is taken; all are kept with their
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.capture.annotations import Pin
from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.cost.footprint import Memory, program_memory
from autopar.cost.price import ClusterPrice
from autopar.cost.program import program_cost
from autopar.errors import ExecutionError, InvalidInput
from autopar.mesh import Mesh
from autopar.passes import rewrite
from autopar.passes.flow import Flow
from autopar.passes.microbatches import Microbatches, batch_statistics, cut_batch
from autopar.pipeline.checker import check
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.price import pipeline_memory, price_step, stage_costs
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import schedule as make_schedule
from autopar.pipeline.stages.costs import StageCost
from autopar.pipeline.stages.cut import cut_stages
from autopar.planner.meshes import meshes
from autopar.planner.request import AXIS, Request
from autopar.search.auto import Found, Progress, too_early, was_interrupted
from autopar.search.smallest_footprint import NothingFits, SmallestFootprint

# For a program, on the best of some meshes, within some bytes on each device, of one of so many
# micro-batches; whether that is all that each device is asked to hold.
Layouts = Callable[[Captured, Sequence[Mesh], float, int, bool], Found]
MOST_AXES = 3  # of a mesh without a pipeline
MOST_INNER_AXES = 2  # of a mesh inside each stage
MOST_STAGES = 16  # that are tried unasked
ATTEMPTS = 4  # at layouts so lean that the stages fit
LEANER = 0.9  # than their memory asks for: few layouts are in between
ROUNDS = (1, 2, 4)  # micro-batches tried, in multiples of the number of stages
# Schedules that are priced where they exist: names with options.
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {}),
    ("interleaved", {"chunks": 2}),
    ("zb-h1", {}),
    ("zb-v", {}),
    ("chimera", {"scale": "direct"}),
    ("chimera", {"scale": "list"}),
)


@dataclass(frozen=True)
class Alternative:
    """One way to run a step that was weighed."""

    mesh: Mesh
    microbatches: int
    schedule: str  # "" without a pipeline
    options: tuple[tuple[str, Any], ...]
    seconds: float  # predicted for a step
    memory: float  # predicted bytes on the fullest device
    fits: bool
    recompute: bool = False  # every stage runs its forward again before its backward

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "mesh": dict(zip(self.mesh.names, self.mesh.shape)),
            "options": dict(self.options),
        }

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options)
        how = f"{self.schedule}{options}, " if self.schedule else ""
        how += "recomputed, " if self.recompute else ""
        fits = "" if self.fits else ", does not fit"
        return (
            f"{self.mesh}: {how}{self.microbatches} micro-batches: {self.seconds:.4g} s, "
            f"{self.memory / 1e9:.4g} GB{fits}"
        )


@dataclass(frozen=True)
class Chosen:
    """The alternative that was taken, ready to become a plan."""

    captured: Captured
    found: Found
    batches: Microbatches | None
    pipelining: Pipelining | None
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class _Way:
    """An alternative with what a plan needs of it."""

    alternative: Alternative
    memory: Memory  # of the fullest device
    captured: Captured
    found: Found
    batches: Microbatches | None
    pipelining: Pipelining | None

    @property
    def leanest(self) -> SmallestFootprint:
        """What this way needs, told to who has less."""
        way, memory = self.alternative, self.memory
        how = f"{way.mesh} with {way.schedule}" if way.schedule else str(way.mesh)
        how += ", recomputed" if way.recompute else ""
        states = memory.parameters + memory.gradients + memory.optimizer
        return SmallestFootprint(how, way.mesh.size, memory.peak, states, way.microbatches)


def choose(
    captured: Captured,
    cluster: Cluster,
    layouts: Layouts,
    request: Request,
    *,
    memory: float = math.inf,
    pins: Sequence[Pin] = (),
    progress: Progress | None = None,
) -> Chosen:
    """The fastest way to run a step of `captured` on `cluster`, of those that `request` allows.

    What is asked for by name is a choice of one.
    """
    report = progress or (lambda phase, detail: None)
    weigher = _Weigher(captured, cluster, layouts, request, memory, pins, report)
    ways: list[_Way] = []
    reasons: dict[str, InvalidInput] = {}
    too_large: list[SmallestFootprint] = []
    interrupted = left = False  # then the best so far is taken, though something is left
    microbatches = request.microbatches
    if microbatches is None and batch_statistics(captured):
        microbatches = 1  # more would be another loss
    sizes = list(_sizes(cluster.devices, request.stages, microbatches))
    for count, parts in sizes:
        try:
            report("pipeline", f"{count} stages, {parts} micro-batches")
            for way in weigher.ways(count, parts):
                ways.append(way)
                if way.alternative.fits:
                    weigher.best = min(weigher.best, way.alternative.seconds)
                interrupted = interrupted or way.found.interrupted
        except (KeyboardInterrupt, ExecutionError) as error:
            if not was_interrupted(error):
                raise
            interrupted = left = True
        except NothingFits as error:
            too_large.append(_share(error.leanest, count))
        except InvalidInput as error:
            if len(sizes) == 1:
                raise
            reasons[f"{count} stages, {parts} micro-batches: {error.rule}: {error.got}"] = error
        if interrupted:
            left = left or (count, parts) != sizes[-1]
            break
    fitting = [way for way in ways if way.alternative.fits]
    if interrupted and not fitting:
        raise too_early()
    too_large += [way.leanest for way in ways if not way.alternative.fits]
    if not fitting and too_large:
        raise NothingFits.of(memory, _least(too_large, request))
    if not fitting:
        raise InvalidInput(
            "a model can be run in some number of stages and micro-batches",
            got="\n".join(reasons),
            remedy="fix fewer of mesh, pipeline, microbatches and memory",
        )
    best = min(fitting, key=lambda way: way.alternative.seconds)
    found = _accounted(best, left)
    alternatives = sorted((way.alternative for way in ways), key=lambda a: (not a.fits, a.seconds))
    return Chosen(best.captured, found, best.batches, best.pipelining, tuple(alternatives))


def _least(too_large: list[SmallestFootprint], request: Request) -> SmallestFootprint:
    """What needs the least, and whether the caller has something left to ask for."""
    least = min(too_large, key=lambda leanest: leanest.memory)
    return replace(least, may_recompute=request.schedule is not None and not request.recompute)


def _accounted(way: _Way, left: bool) -> Found:
    """What was found for a way, told of a step; `left`: something was not weighed."""
    account, pipelining = way.found.search, way.pipelining
    if account is None:
        return way.found
    account = account.cut_short() if left else account
    ranks = pipelining.schedule.ranks if pipelining is not None else 1
    return replace(way.found, search=account.shared(ranks))


def _sizes(devices: int, stages: int | None, microbatches: int | None) -> Iterator[tuple[int, int]]:
    """Numbers of stages and of micro-batches to try."""
    most = min(devices, MOST_STAGES)
    counts = [stages] if stages else [n for n in range(1, most + 1) if devices % n == 0]
    for count in counts:
        if microbatches is not None:
            yield count, microbatches
        elif count == 1:
            yield 1, 1
        else:
            yield from ((count, count * rounds) for rounds in ROUNDS)


def _share(whole: SmallestFootprint, stages: int) -> SmallestFootprint:
    """What a stage needs at least, of what a model needs that was searched as a whole."""
    if stages == 1:
        return whole
    return replace(
        whole,
        how=f"{stages} equal stages, each on {whole.how}",
        devices=stages * whole.devices,
        memory=whole.memory / stages,
        states=whole.states / stages,
    )


class _Weigher:
    """Plans and prices alternatives; what they share is made once."""

    def __init__(
        self,
        captured: Captured,
        cluster: Cluster,
        layouts: Layouts,
        request: Request,
        memory: float,
        pins: Sequence[Pin],
        report: Progress,
    ) -> None:
        self.whole, self.cluster, self.layouts = captured, cluster, layouts
        self.memory, self.pins, self.report = memory, pins, report
        self.request = request
        self._cut: dict[int, Microbatches] = {}
        self.best = float("inf")  # seconds of the fastest way that fits

    def ways(self, stages: int, parts: int) -> Iterator[_Way]:
        """Every way with this many stages and micro-batches."""
        asked = self.request
        straight = stages == 1 and asked.schedule is None
        batches = None if straight and parts == 1 else self._batches(parts)
        captured = batches.captured if batches else self.whole
        axes = MOST_AXES if stages == 1 else MOST_INNER_AXES
        inner = (
            [asked.inner]
            if asked.inner is not None
            else meshes(self.cluster.devices // stages, axes, self.cluster)
        )
        # Each stage has a share of the states, and at least the activations of one micro-batch.
        limit = leanest = self.memory * stages
        impossible = 0.0  # bytes that no layouts fit in
        for attempt in range(ATTEMPTS):
            try:
                found = self.layouts(captured, inner, limit, parts, straight)
            except NothingFits:
                if not attempt:
                    raise
                impossible, limit = limit, (limit + leanest) / 2
                continue
            if straight:
                yield self._straight(captured, found, batches)
                return
            # A pipeline without bubbles gives every stage its part of the work.
            if found.search is not None and found.search.objective / stages >= self.best:
                return
            taken = float("inf")
            for way in self._pipelined(captured, found, batches, stages, parts):
                yield way
                taken = min(taken, way.alternative.memory)
            if taken <= self.memory or found.search is None:
                return
            # Stages are uneven, and keep several micro-batches: leaner layouts may leave room.
            inner = [found.decisions.mesh]
            leanest = min(limit, found.memory)
            limit = max(LEANER * leanest * self.memory / taken, (impossible + leanest) / 2)

    def _batches(self, parts: int) -> Microbatches:
        if parts not in self._cut:
            self._cut[parts] = cut_batch(self.whole, parts)
        return self._cut[parts]

    def _straight(self, captured: Captured, found: Found, batches: Microbatches | None) -> _Way:
        parts = batches.count if batches else 1
        price = ClusterPrice(self.cluster, found.decisions.mesh)
        graph = rewrite(captured, found.decisions, price)
        cost = program_cost(graph, found.decisions.mesh, self.cluster).times(parts)
        memory = program_memory(graph, found.decisions.mesh)
        peak = memory.peak
        alternative = Alternative(
            found.decisions.mesh, parts, "", (), cost.seconds, peak, peak <= self.memory
        )
        return _Way(alternative, memory, captured, found, batches, None)

    def _pipelined(
        self,
        captured: Captured,
        found: Found,
        batches: Microbatches | None,
        stages: int,
        parts: int,
    ) -> Iterator[_Way]:
        inner = found.decisions.mesh
        asked, axis = self.request, self.request.axis or AXIS
        mesh = asked.mesh or Mesh(**{axis: stages, **dict(zip(inner.names, inner.shape))})
        price = ClusterPrice(self.cluster, inner)
        graph = rewrite(captured, found.decisions, price)
        line = stage_costs(captured, graph, inner, self.cluster, mesh, axis)
        lines = {False: line, True: line.recomputed()}

        def priced(made: Schedule, stages: Sequence[StageCost], again: bool) -> _Way:
            pipelining = Pipelining(axis, mesh, made, tuple(stages), again)
            return self._priced(pipelining, line.flow, captured, found, batches)

        fastest: dict[tuple[int, bool], Sequence[StageCost]] = {}
        offered = schedules(stages, parts) if asked.schedule is None else iter([asked.schedule])
        for made in offered:
            for again in (False, True) if asked.schedule is None else (asked.recompute,):
                key = made.stages, again
                try:
                    if key not in fastest:
                        fastest[key] = cut_stages(lines[again], made, pins=self.pins)
                except InvalidInput:
                    # Schedules with several chunks want more stages than others: only they fail.
                    if made.stages == stages or made is asked.schedule:
                        raise
                    break
                way = priced(made, fastest[key], again)
                tight = not way.alternative.fits and way.alternative.seconds < self.best
                if tight:
                    with suppress(InvalidInput):
                        cut = cut_stages(
                            lines[again], made, pins=self.pins, memory=self.memory, recompute=again
                        )
                        way = priced(made, cut, again)
                yield way
                if not tight:
                    break

    def _priced(
        self,
        pipelining: Pipelining,
        flow: Flow,
        captured: Captured,
        found: Found,
        batches: Microbatches | None,
    ) -> _Way:
        timeline = price_step(pipelining, self.cluster)
        memory, made = pipeline_memory(pipelining, flow), pipelining.schedule
        alternative = Alternative(
            pipelining.mesh,
            made.microbatches,
            made.name,
            made.options,
            timeline.step_time,
            memory.peak,
            memory.peak <= self.memory,
            pipelining.recompute,
        )
        return _Way(alternative, memory, captured, found, batches, pipelining)


def schedules(stages: int, microbatches: int) -> Iterator[Schedule]:
    """Every schedule that exists for these numbers."""
    for name, options in SCHEDULES:
        try:
            made = make_schedule(name, stages=stages, microbatches=microbatches, **options)
            check(made)
        except InvalidInput:
            continue
        yield made
