"""Leanest: where nothing fits, the ways that take least, so that people are told how much that is.

for way in in_each_number_of_stages(sizes, 3, ways): ...
ways(4, 8)    # by leanest(asked, layouts, regions, kinds, schedules, staged)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Schedule
from autopar.planner.candidate import Candidate
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.recomputation import Regions
from autopar.planner.staged import StagedProgram
from autopar.recompute import Recompute
from autopar.search.auto import NothingFaster
from autopar.search.smallest_footprint import NothingFits

_ROUNDED = 1 + 1e-9


def in_each_number_of_stages(
    sizes: Sequence[tuple[int, int]], most: int, ways: Callable[[int, int], Iterator[Candidate]]
) -> Iterator[Candidate]:
    """The ways of `sizes`, of stages and micro-batches: in `most` numbers of stages, with those
    micro-batches of which all ranks together keep least."""
    tried = set[int]()
    for size in sorted(sizes, key=lambda size: (min(size) / size[1], size)):
        if size[0] not in tried and len(tried) < most:
            with suppress(InvalidInput, NothingFaster):  # a batch too small, or too few calls
                yield from ways(*size)
                tried.add(size[0])


def leanest(
    asked: LayoutRequest,
    layouts: Layouts,
    regions: Regions,
    kinds: Sequence[Recompute],
    schedules: Sequence[Schedule],
    staged: Callable[[Candidate], StagedProgram],
) -> Iterator[Candidate]:
    """With the layouts that take least of those that are asked for, as far as the search adds that
    up, and regions that are treated in one of these `kinds`. Without `schedules` devices hold one
    program, with them it is in stages."""
    lean = replace(asked, is_all=False, recompute=regions.all(kinds[0]))
    try:
        laid, _ = layouts.find(replace(lean, memory=1.0))
    except NothingFits as error:
        laid, _ = layouts.find(replace(lean, memory=error.smallest.memory * _ROUNDED))
    if not schedules:
        yield from (laid.recomputed(regions.all(kind)) for kind in kinds)
        return
    program = staged(laid)
    ways = [program.fastest(made, kind) for made in schedules for kind in kinds]
    yield min(ways, key=lambda way: way.least).candidate
