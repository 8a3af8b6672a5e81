"""Leanest: where nothing fits, the ways that take least, so that people are told how much that is.

for way in in_each_number_of_stages(sizes, 3, ways): ...
ways(4, 8)    # by leanest(asked, layouts, regions, kinds, schedules, staged)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from autopar.candidates.candidate import Candidate
from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Schedule
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.recomputation import Regions
from autopar.planner.staged import StagedProgram, StagedWay
from autopar.recompute import Recompute
from autopar.search.layout_search import NothingFaster
from autopar.search.smallest_footprint import NothingFits

_ROUNDED = 1 + 1e-9
_NEAR = 4  # ways that keep least, of which the finished programs are looked at


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
    up, and regions that are treated in one of these `kinds`; then with others, of which finished
    programs take less. Without `schedules` devices hold one program, with them it is in stages."""
    lean, bound = replace(asked, is_all=False, recompute=regions.all(kinds[0])), 0.0
    try:
        laid, _ = layouts.find(replace(lean, memory=1.0))
    except NothingFits as error:
        bound = error.smallest.memory
        laid, _ = layouts.find(replace(lean, memory=bound * _ROUNDED))
    if not schedules:
        alike = [laid.recomputed(regions.all(kind)) for kind in kinds]
        yield from alike
        yield from _below(min(alike, key=lambda way: way.memory.peak), asked, layouts, bound)
        return
    ways = sorted(_in_stages(staged(laid), schedules, kinds), key=lambda way: way.least)
    # What stages keep adds up to less than all that they take.
    yield min((way.candidate for way in ways[:_NEAR]), key=lambda way: way.memory.peak)


def _below(
    least: Candidate, asked: LayoutRequest, layouts: Layouts, bound: float
) -> Iterator[Candidate]:
    """What takes less than `least`, with the same regions treated alike, as long as there is some
    half way to what the search adds up at least."""
    asked, most = replace(asked, recompute=least.decisions.recompute), least.memory.peak
    with suppress(NothingFits, NothingFaster):
        while most > bound:
            limit = (bound + most) / 2
            way, _ = layouts.find(replace(asked, memory=limit))
            if (most := way.memory.peak) > limit:
                return  # layouts are not chosen
            yield way


def _in_stages(
    program: StagedProgram, schedules: Sequence[Schedule], kinds: Sequence[Recompute]
) -> list[StagedWay]:
    """By each schedule for which there are stages; an error if there is none."""
    found: list[StagedWay] = []
    refused: list[InvalidInput] = []
    for made, kind in product(schedules, kinds):
        try:
            found.append(program.fastest(made, kind))
        except InvalidInput as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found
