"""Every way to run a step, each asked for by name: what the automatic choice is compared with.

    with shared_captures(), shared_searches():
        ways = [way for way in every_way(case, cluster, memory) if way]
    min(way.seconds for way in ways)

A way fixes the devices, the stages, the micro-batches, the mesh with the order of its axes, the
schedule with its options, the states, and what is recomputed. Nothing is left to weigh but layouts,
where stages are cut and, with `recompute="auto"`, which regions run again: no way rules out others.
States are whole and nothing runs again where that fits, as `plan` says; else everything is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import autopar as ap
from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks
from autopar.mesh import Mesh, meshes
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.pipeline.schedules import weighed_schedules
from autopar.planner import asker
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.offers import offers
from autopar.recompute import Recompute
from autopar.search.layout_search import SearchCache
from autopar.search.smallest_footprint import NothingFits
from autopar.states import HOSTED, NAMED
from tests.models import Case

PLAIN = {"states": "whole", "recompute": None}
PIECES = [Recompute(kind, "cut") for kind in (None, "selective", "full")]
AGAIN = (None, "selective", "full", *PIECES, Recompute("full", "host"), "auto")
SAVING = [{"states": one, "recompute": how} for one in (*NAMED, *HOSTED) for how in AGAIN]


@dataclass(frozen=True)
class Way:
    """What is asked for of a plan on some devices of a cluster, and what comes of it."""

    cluster: ap.Cluster
    options: Mapping[str, Any]
    seconds: float

    def __str__(self) -> str:
        told = ", ".join(f"{name}={_told(value)}" for name, value in self.options.items())
        return f"{self.cluster.used_of_nodes}: {told}"


def every_way(
    case: Case,
    machines: ap.Cluster,
    memory: float | None = None,
    *,
    most_stages: int | None = None,
    saves: bool = False,
) -> Iterator[Way | None]:
    """All of them; None for each that does not fit, or that there is not. `saves`: also those that
    save memory where that is not asked for."""
    batch = next(iter((*case.args, *case.kwargs.values()))).shape[0]
    count = len(blocks(capture(case.model, case.args, case.kwargs)))
    for part in offers(machines):
        for size in _sizes(part, batch, most_stages or part.devices, count):
            for saving in SAVING:
                given = {**size, **saving}
                try:
                    about = {"cluster": part, "memory": memory, **given}
                    plan = ap.plan(case.model, case.args, case.kwargs, **about)
                except NothingFits:
                    yield None
                except ap.AutoparError:  # the program has no such stages or parts
                    yield None
                    if saving == PLAIN:
                        break
                else:
                    yield Way(part, given, plan.cost.seconds)
                    if saving == PLAIN and not saves:
                        break


def _sizes(part: ap.Cluster, batch: int, most_stages: int, count: int) -> Iterator[dict[str, Any]]:
    """Stages, micro-batches, mesh and schedule, of a program of so many equal blocks."""
    counts = [parts for parts in range(1, batch + 1) if batch % parts == 0]
    for parts in counts:
        for mesh in _meshes(part.devices, 3 if parts == 1 else 2):
            yield {"mesh": mesh, "pipeline": None, "microbatches": parts}
    for stages in range(2, most_stages + 1):
        for parts in counts if part.devices % stages == 0 else ():
            for inner in _meshes(part.devices // stages, 2):
                mesh = Mesh(pp=stages, **inner.sizes)
                for made in weighed_schedules(stages, parts, count):
                    yield {"mesh": mesh, "schedule": made, "microbatches": made.microbatches}


def _meshes(devices: int, most: int) -> list[Mesh]:
    """Also those with axes that straddle the borders of nodes."""
    return meshes(devices, most, devices) if devices > 1 else [Mesh(x=1)]


@contextmanager
def shared_searches() -> Iterator[None]:
    """Within, ways that differ in their schedules alone share the layouts found for them."""
    searched = Layouts._searched
    found: dict[tuple[object, ...], tuple[Any, Exception | None]] = {}
    held: list[object] = []  # what is known by its id

    def once(self: Layouts, asked: LayoutRequest) -> Any:
        request = self.request
        regions = tuple(sorted(asked.recompute.items()))
        about = asked.memory, asked.is_unstaged, asked.states, regions, asked.batch_axis, asked.line
        key = id(asked.captured), request.cluster, tuple(asked.offered), asked.cutoff, *about
        if key not in found:
            held.append(asked.captured)
            try:
                found[key] = searched(self, asked), None
            except ap.AutoparError as error:
                found[key] = None, error.with_traceback(None)
        value, error = found[key]
        if error is not None:
            raise error
        return value

    built: dict[tuple[object, ...], SearchCache] = {}

    def graphs(self: Layouts, asked: LayoutRequest) -> SearchCache:
        regions = tuple(sorted(asked.recompute.items()))
        about = asked.batch_axis, asked.states, regions, asked.line
        return built.setdefault((id(asked.captured), self.request.cluster, *about), SearchCache())

    batches: dict[tuple[int, int], Microbatches] = {}

    def cut(captured: Captured, parts: int) -> Microbatches:
        key = id(captured), parts
        if key not in batches:
            held.append(captured)
            batches[key] = cut_batch(captured, parts)
        return batches[key]

    short: dict[tuple[object, ...], Any] = {}

    def folded(captured: Captured, *beside: tuple[int, int]) -> Any:
        key = id(captured), *beside
        if key not in short:
            held.append(captured)
            short[key] = make_short(captured, *beside)
        return short[key]

    make_short = asker.fold
    with (
        patch.object(Layouts, "_searched", once),
        patch.object(Layouts, "_graphs", graphs),
        patch.object(asker, "cut_batch", cut),
        patch.object(asker, "fold", folded),
    ):
        yield


def _told(value: Any) -> str:
    words = getattr(value, "options", None)
    return f"{value.name}{dict(words) or ''}" if words is not None else str(value)
