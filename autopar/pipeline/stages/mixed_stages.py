"""Mixed stages: stages whose first regions are recomputed in one way, and the rest in another.

    stages = MixedStages(lines, regions, cuts)           # lines of costs, one for each way
    options = stages.options(start, end, hardware)       # all mixes of one stage
    chosen = fastest_options([options, ...], [counts, ...], rooms)

What remakes most runs first, and so goes backward when least is kept. Every sum is that of the
leanest way, and the difference of another way from where it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.stages.stage_cost import StageCost
from autopar.pipeline.stages.stage_hardware import StageHardware
from autopar.pipeline.stages.stage_tables import StageCosts, StagePiece
from autopar.pipeline.stages.table import StageTable
from autopar.strategies.node_info import info

Array = NDArray[np.float64]
_EQUAL = 1e-9  # relative
_MOST_PAIRS = 1 << 20  # numbers, of options of two stages that are looked at together


@dataclass(frozen=True)
class LineRegion:
    """A region of a program, between two places of its line of activations."""

    name: str
    start: int
    end: int


def regions_of(
    line: StageCosts, names: Iterable[str], whole_names: Sequence[str]
) -> list[LineRegion]:
    """Return the regions called `names`, of a line in which these are recomputed.

    `whole_names`: what they are called in the program that the line stands for.
    """
    names, places = frozenset(names), dict[tuple[str, int, int], list[int]]()
    for place, later in zip(range(line.count), line.flow.place_map.later.tolist()):
        region = info(line.node(place)).region
        if region is not None and region.name in names:
            key = region.name, region.number, later
            places.setdefault(key, [place, place])[1] = place + 1
    short_names = dict.fromkeys((name, later) for name, _, later in places)
    of_whole = dict(zip(short_names, whole_names, strict=True))
    return [LineRegion(of_whole[name, later], *ends) for (name, _, later), ends in places.items()]


@dataclass(frozen=True)
class MixOptions:
    """All mixes of one stage: their seconds, and the bytes that each LiveCounts multiplies."""

    seconds: Array  # by option
    sizes: Array  # by option: LiveCounts, the states, then how many regions run in later ways
    ends: NDArray[np.int64]  # by option and way: the cut points between the ways

    def uniform(self, way: int) -> int:
        """Return the number of the option in which all regions run in one way."""
        is_all = self.ends[:, way + 1] - self.ends[:, way] == self.ends[:, -1] - self.ends[:, 0]
        return int(is_all.argmax())

    def bytes(self, counts: Array) -> Array:
        """Return the bytes by option and moment, for the counts of each moment."""
        return self.sizes @ counts.T


class MixedStages:
    """Tables of the stages of a program whose regions may be recomputed in several ways."""

    def __init__(
        self, lines: Sequence[StageCosts], regions: Sequence[LineRegion], cuts: Iterable[int]
    ) -> None:
        """`lines`: with all regions treated alike, the leanest way first. `cuts`: the cut points at
        which a stage may start."""
        self.lines, self.regions, cuts = lines, regions, {*cuts}
        bounds = {place for region in regions for place in (region.start, region.end)}
        self.points = sorted({*cuts, *bounds} - {lines[0].count})
        self.place = {point: at for at, point in enumerate([*self.points, lines[0].count])}
        self._cuts = np.array([point in cuts for point in self.points] + [True])
        self._tables = [self._table(line) for line in lines]
        self.table = self._tables[0]
        self._starts = np.array([self.place[region.start] for region in regions])
        self._ends = np.array([self.place[region.end] for region in regions])

    def _table(self, line: StageCosts) -> StageTable:
        """Return the table of a line, with what single regions exceed that they keep."""
        table, at = line.table(tuple(self.points)), np.array([*self.points, line.count])
        remade = np.zeros_like(table.remade)
        for region in self.regions if table.remade.any() else ():
            where = np.ix_(at < region.end, at > region.start)
            size = round(line.remade(region.start, region.end, is_split=False))
            remade[where] = np.maximum(remade[where], size)
        return replace(table, remade=remade)

    def offered(self, count: int, fixed: Mapping[int, int]) -> list[NDArray[np.bool_]]:
        """Return the candidates of each of `count` stages; `fixed`: cut points of pinned ones."""
        offered = self.table.offered(count, {s: self.place[point] for s, point in fixed.items()})
        return [mask & self._cuts[:, None] & self._cuts for mask in offered]

    def least_seconds(
        self,
        offered: NDArray[np.bool_],
        counts: Array,
        rooms: Array,
        at: StageHardware,
        limit: float = np.inf,
    ) -> Array:
        """Return by start and end the least seconds of a stage that fits at all moments.

        Infinite where none does, and where no mix takes less than `limit` seconds.
        """
        least = np.full(offered.shape, np.inf)
        times = [line.times(tuple(self.points), at) for line in self.lines]
        cells = np.nonzero(offered & (np.minimum.reduce(times) <= limit * (1 + _EQUAL)))
        seconds = [time[cells] for time in times]
        sizes = [self._sizes(way, *cells) @ counts.T for way in range(len(self.lines))]
        fits = [(size <= rooms).all(axis=1) for size in sizes]
        best = np.min([np.where(f, s, np.inf) for f, s in zip(fits, seconds)], axis=0)
        units = np.maximum(self.regions_between[cells], 1)
        for lean, rich in combinations(range(len(sizes)), 2):
            more = sizes[rich] - sizes[lean]
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = np.where(more > 0, (rooms - sizes[lean]) / more, 1.0)
            share = np.clip(shares.min(axis=1), 0.0, 1.0)
            share = np.floor(share * units * (1 + _EQUAL)) / units  # of whole regions
            time = seconds[lean] + share * (seconds[rich] - seconds[lean])
            best = np.where(fits[lean], np.minimum(best, time), best)
        least[cells] = best
        return least

    def slowest(self, cut: Sequence[int], hardware: Sequence[StageHardware]) -> float:
        """Return the seconds of the slowest stage of a cut where all runs in the leanest way."""
        bounds = pairwise([*cut, len(self.points)])
        times = (self.lines[0].times(tuple(self.points), at) for at in hardware)
        return max(float(time[start, end]) for time, (start, end) in zip(times, bounds))

    @cached_property
    def regions_between(self) -> NDArray[np.int64]:
        """Return how many regions, or parts of them, there are between two cut points."""
        at = np.arange(len(self.place))
        begun = (self._starts[:, None] < at).sum(axis=0)
        ended = (self._ends[:, None] <= at).sum(axis=0)
        return begun[None, :] - ended[:, None]

    def _sizes(self, way: int, start: NDArray, end: NDArray) -> Array:
        """Return the sizes, as of options, of stages whose regions all run in one way."""
        columns = [column[start, end] for column in self._tables[way].by_count]
        later = np.zeros((len(start), len(self.lines) - 1))
        later[:, way - 1 : way] = self.regions_between[start, end][:, None]
        return np.column_stack([*columns, later])

    def options(self, start: int, end: int, at: StageHardware) -> MixOptions:
        """Return all mixes of the stage between two of the cut points, given by their numbers."""
        inside = self._starts[(self._starts < end) & (self._ends > start)]
        bounds = np.array([start, *inside[1:], end])
        ways, units = len(self.lines), len(bounds) - 1
        between = [*combinations_with_replacement(range(units + 1), ways - 1)]
        numbers = np.array(between, np.int64).reshape(len(between), ways - 1)
        numbers = np.pad(numbers, ((0, 0), (1, 1)), constant_values=(0, units))
        ends = bounds[numbers]
        points, runs = tuple(self.points), [*pairwise(ends.T)]
        times = [line.times(points, at.without_links) for line in self.lines]
        seconds = times[0][start, end] + self._mixed(times, runs)
        whole = self.table.kept, self.table.weight_halves
        tables = [[t.kept for t in self._tables], [t.weight_halves for t in self._tables]]
        kept, halves = (
            all_[start, end] + self._mixed(each, runs) for all_, each in zip(whole, tables)
        )
        remade, later = np.zeros(len(ends)), np.zeros(len(ends))
        for table, (first, last) in reversed([*zip(self._tables, runs)]):
            again = np.where(first < last, table.remade[first, last], 0)
            remade = np.maximum(remade, again - later)
            later += table.kept[first, last]
        ones = np.ones(len(ends))
        received, states = self.table.received[start] * ones, self.table.states[start, end] * ones
        again_split = remade + np.maximum(halves - kept, 0)
        later = np.diff(numbers)[:, 1:]
        sizes = np.column_stack([kept, received, halves, remade, again_split, states, later])
        return MixOptions(seconds, sizes, ends)

    def _mixed(self, tables: Sequence[NDArray], runs: Sequence[Sequence[NDArray]]) -> Array:
        """Return by option the sum, less that of the leanest way."""
        differences = [
            t[first, last] - tables[0][first, last] for t, (first, last) in zip(tables, runs)
        ]
        return np.sum(differences, axis=0, dtype=float)

    def ways_of(self, cut: Sequence[int], ends: Sequence[NDArray]) -> dict[str, int]:
        """Return the number of the way of each region by name, in the stages that start at `cut`
        and whose ways end there; the leanest, if a region is in several stages."""
        chosen: dict[str, int] = {}
        bounds = [*cut, len(self.points)]
        for region, first, last in zip(self.regions, self._starts, self._ends):
            for (start, end), row in zip(pairwise(bounds), ends):
                if start < last and first < end:
                    way = int(np.searchsorted(row[1:], max(first, start), side="right"))
                    chosen[region.name] = min(way, chosen.get(region.name, way))
        return chosen

    def stages(
        self, cut: Sequence[int], ways: Mapping[str, int], hardware: Sequence[StageHardware]
    ) -> list[StageCost]:
        """Return the costs of the stages that start at `cut`, whose regions are recomputed so."""
        points = [*self.points, self.lines[0].count]
        bounds = pairwise([points[at] for at in (*cut, len(self.points))])
        return [
            self.lines[0].stage(start, end, at, self._pieces(start, end, ways))
            for (start, end), at in zip(bounds, hardware)
        ]

    def _pieces(self, start: int, end: int, ways: Mapping[str, int]) -> list[StagePiece]:
        pieces: list[StagePiece] = []
        for region in self.regions:
            line = self.lines[ways[region.name]]
            first, last = max(start, region.start), min(end, region.end)
            if first >= last or line is self.lines[0]:
                continue
            if pieces and pieces[-1][0] is line and pieces[-1][2] == first:
                _, first, _ = pieces.pop()
            pieces.append((line, first, last))
        return pieces


def fastest_options(
    options: Sequence[MixOptions], counts: Sequence[Array], rooms: Array
) -> list[int] | None:
    """Return for each stage of some ranks the option that is chosen; None if nothing fits.

    From the fastest of each on, that option is taken next which spares most of the bytes that are
    missing for the seconds that it costs. Then each stage, and each two of them together, take the
    fastest that fits beside the others: of one or two stages, that is the best of all.
    """
    sizes = [choices.bytes(count) for choices, count in zip(options, counts)]
    chosen = [int(choices.seconds.argmin()) for choices in options]
    used = np.sum([size[at] for size, at in zip(sizes, chosen)], axis=0)
    while (missing := np.maximum(used - rooms, 0)).any():
        ratios = []
        for choices, size, at in zip(options, sizes, chosen):
            # Rounded as below: an option that spares nothing must not seem to spare a little.
            left = np.maximum(used + (size - size[at]) - rooms, 0).sum(axis=1)
            cost = np.maximum(choices.seconds - choices.seconds[at], _EQUAL * choices.seconds[at])
            ratios.append((missing.sum() - left) / cost)
        stage = int(np.argmax([ratio.max() for ratio in ratios]))
        best = int(ratios[stage].argmax())
        if ratios[stage][best] <= 0:
            return None
        used = used + (sizes[stage][best] - sizes[stage][chosen[stage]])
        chosen[stage] = best
    numbers = range(len(options))
    together = [(stage,) for stage in numbers] + [
        pair
        for pair in combinations(numbers, 2)
        if len(sizes[pair[0]]) * sizes[pair[1]].size <= _MOST_PAIRS
    ]
    is_changed = True
    while is_changed:
        is_changed = False
        for stages in together:
            before, size, seconds = 0.0, np.zeros((1, len(rooms))), np.zeros(1)
            rest = used - sum(sizes[stage][chosen[stage]] for stage in stages)
            for stage in stages:
                before += options[stage].seconds[chosen[stage]]
                size = (size[:, None] + sizes[stage]).reshape(-1, len(rooms))
                seconds = np.add.outer(seconds, options[stage].seconds).ravel()
            quick = np.flatnonzero(seconds < before * (1 - _EQUAL))
            quick = quick[(rest + size[quick] <= rooms).all(axis=1)]
            if len(quick):
                best = quick[seconds[quick].argmin()]
                shape = [len(options[stage].seconds) for stage in stages]
                for stage, at in zip(stages, np.unravel_index(best, shape)):
                    chosen[stage] = int(at)
                used, is_changed = rest + size[best], True
    return chosen
