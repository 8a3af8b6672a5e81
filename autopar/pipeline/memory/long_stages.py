"""Long stages: the memory of the stages of a whole program, computed on the folded one."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import replace
from itertools import pairwise

from autopar.passes.flow import Flow
from autopar.passes.stages import StageCut
from autopar.pipeline.memory.alike_stages import StageMemories
from autopar.pipeline.memory.step_memory import StageMemory
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.stage_tables import StageCosts


def taken_by_long_stages(
    costs: StageCosts,
    pipelining: Pipelining,
    look_at: StageMemories,
    known: MutableMapping[Hashable, StageMemory],
) -> dict[int, StageMemory]:
    """Return the memory of each stage by index.

    `known`: a cache, of stages with equal bounds, shared parameters and counts.
    """
    made, found = pipelining.schedule, {}
    for index, bounds in enumerate(_bounds(costs, pipelining)):
        start, end, counts = costs.flow.place_map.stage(*bounds)
        cut, own = in_three(costs.flow, start, end, made, index), int(start > 0)
        cut = replace(cut, counts=counts)
        key = cut.bounds(own), cut.shared(own), index in made.split_stages, counts
        if key not in known:
            known[key] = _shared(look_at(cut, own, index in made.split_stages), cut)
        found[index] = known[key]
    return found


def _shared(memory: StageMemory, cut: StageCut) -> StageMemory:
    """Keep the names of those parameters alone that other stages read, too: what stands for several
    blocks has one name in all of them."""
    names = {node.name for node, readers in cut.readers.items() if not readers.is_own}
    learned = {name: size for name, size in memory.learned.items() if name in names}
    return replace(memory, learned=learned, at_once=memory.at_once & names)


def in_three(
    flow: Flow, start: int = 0, end: int = 0, made: Schedule | None = None, index: int = 0
) -> StageCut:
    """Cut a program into a stage, and what comes before and after it."""
    count = len(flow.activations)
    points = sorted({0, start, end or count, count})
    first = index - (start > 0)
    own = range(first, first + len(points) - 1)
    places = [tuple(row[n] for n in own) for row in made.placement] if made else [(0,)]
    return StageCut(flow, tuple(points), tuple(places))


def bounds_by_place(costs: StageCosts, pipelining: Pipelining) -> list[list[tuple[int, int]]]:
    """Return the start and end of each stage on each place along the pipeline."""
    bounds, made = _bounds(costs, pipelining), pipelining.schedule
    return [[bounds[stage] for stage in made.stages_on(place)] for place in range(made.ranks)]


def _bounds(costs: StageCosts, pipelining: Pipelining) -> list[tuple[int, int]]:
    starts = [costs.places[stage.starts] for stage in pipelining.stages]
    return list(pairwise([*starts, costs.count]))
