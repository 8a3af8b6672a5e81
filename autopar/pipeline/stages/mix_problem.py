"""Mix problem: which regions of each stage run again, so that every rank of a schedule has room.

    problem = MixProblem(tables, schedule, hardware, rooms)    # bytes of each rank
    cut = problem.cut(offered, hardware)                       # of stages whose slowest is fastest
    mix = problem.mix(cut)                                     # None: the leanest does not fit
    problem.bytes(mix)                                         # that each rank keeps at its peak

Ranks that hold the same stages belong together: what runs again in a stage does so on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.memory.activation_counts import peaks_by_rank
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.mixed_stages import Array, MixedStages, MixOptions, fastest_options
from autopar.pipeline.stages.stage_hardware import StageHardware

NONE_LIVE = (0,) * 6


@dataclass(frozen=True)
class StageMix:
    """A cut, with the mix of each of its stages."""

    cut: tuple[int, ...]  # the numbers of the cut points
    options: Sequence[MixOptions]
    chosen: Sequence[int]  # of the options, by stage

    @property
    def ends(self) -> list[NDArray[np.int64]]:
        """Return by stage the cut points between the ways."""
        return [choices.ends[at] for choices, at in zip(self.options, self.chosen)]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each stage, without messages."""
        return [float(choices.seconds[at]) for choices, at in zip(self.options, self.chosen)]

    @property
    def sizes(self) -> list[Array]:
        """Return by stage the bytes for choices of each of LiveCounts, and of the states."""
        return [choices.sizes[at] for choices, at in zip(self.options, self.chosen)]

    @property
    def remade(self) -> list[int]:
        """Return by stage the bytes that backward recomputes beyond what forward keeps."""
        return [round(float(size[3])) for size in self.sizes]


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold the same stages, at all their peaks."""

    ranks: NDArray[np.int64]  # the rank of each peak
    # By stage, at each peak: LiveCounts, and 1 if the rank holds the stage.
    counts: Mapping[int, Array]

    def with_slopes(self, slopes: Array) -> RankGroup:
        """Return the group with further counts: the `slopes` of the ranks that hold a stage."""
        of_ranks = slopes[self.ranks]
        counts = {s: np.hstack([row, of_ranks * row[:, -1:]]) for s, row in self.counts.items()}
        return RankGroup(self.ranks, counts)


@lru_cache(maxsize=64)
def rank_groups(schedule: Schedule) -> list[RankGroup]:
    """Return the ranks of a schedule in groups that have no stage in common."""
    connected: list[set[int]] = []
    for rank in range(schedule.ranks):
        stages_here = set(schedule.stages_on(rank))
        near = [stages for stages in connected if not stages.isdisjoint(stages_here)]
        connected = [stages for stages in connected if stages.isdisjoint(stages_here)]
        connected.append(stages_here.union(*near))
    peaks = [
        (rank, live)
        for rank, lives in enumerate(peaks_by_rank(schedule, recompute=True))
        for live in lives
    ]
    groups = []
    for stages in connected:
        lives = [(rank, live) for rank, live in peaks if not stages.isdisjoint(live)]
        counts = {
            stage: np.array(
                [(*live[stage], 1) if stage in live else NONE_LIVE for _, live in lives]
            )
            for stage in sorted(stages)
        }
        groups.append(RankGroup(np.array([rank for rank, _ in lives]), counts))
    return groups


@dataclass(frozen=True)
class MixProblem:
    """The stages of a program, the ranks of a schedule, and the bytes that each of these has."""

    tables: MixedStages
    schedule: Schedule
    hardware: tuple[StageHardware, ...]  # of each stage
    rooms: Array  # bytes by rank
    slopes: Array  # by rank: bytes beyond sums for each region that runs in a later way

    @property
    def is_shared(self) -> bool:
        """Return whether stages share the memory of a rank."""
        return any(len(group.counts) > 1 for group in self._groups)

    @cached_property
    def _groups(self) -> list[RankGroup]:
        return [group.with_slopes(self.slopes) for group in rank_groups(self.schedule)]

    def bytes(self, mix: StageMix) -> Array:
        """Return the bytes that each rank keeps when it keeps most."""
        most = np.zeros(self.schedule.ranks)
        for group in self._groups:
            used = np.sum(
                [count @ mix.sizes[stage] for stage, count in group.counts.items()], axis=0
            )
            np.maximum.at(most, group.ranks, used)
        return most

    def period(self, mix: StageMix) -> float:
        """Return the seconds of a micro-batch on the rank that takes most."""
        ranks = range(self.schedule.ranks)
        return max(sum(mix.seconds[at] for at in self.schedule.stages_on(rank)) for rank in ranks)

    def uniform(self, cut: Sequence[int], way: int = 0) -> StageMix:
        """Return a cut of which all regions run in one way."""
        options = self._options(cut)
        return StageMix(tuple(cut), options, [choices.uniform(way) for choices in options])

    def regions(self, cut: Sequence[int]) -> Array:
        """Return how many regions each rank has."""
        bounds = [*cut, len(self.tables.points)]
        counts = [self.tables.regions_between[ends] for ends in pairwise(bounds)]
        ranks = map(self.schedule.stages_on, range(self.schedule.ranks))
        return np.array([sum(counts[stage] for stage in stages) for stages in ranks], float)

    def mix(self, cut: Sequence[int]) -> StageMix | None:
        """Return the fastest mix of a cut that fits; None: none does."""
        options, chosen = self._options(cut), [0] * len(cut)
        for group in self._groups:
            of_group = [options[stage] for stage in group.counts]
            best = fastest_options(of_group, [*group.counts.values()], self.rooms[group.ranks])
            if best is None:
                return None
            for stage, at in zip(group.counts, best):
                chosen[stage] = at
        return StageMix(tuple(cut), options, chosen)

    def cut(
        self,
        offered: Sequence[NDArray[np.bool_]],
        hardware: Sequence[StageHardware],
        known: StageMix | None = None,
        limit: float = np.inf,
    ) -> list[int] | None:
        """Return the cut of which the slowest stage is fastest where each has its best mix.

        None if no cut fits. `known`: where stages share a rank, each has the room that this mix
        leaves beside the others. `limit`: seconds that no stage needs to take.
        """
        seconds: dict[int, Array] = {}
        for group in self._groups:
            rooms, counts = self.rooms[group.ranks], group.counts
            used = {s: 0.0 if known is None else row @ known.sizes[s] for s, row in counts.items()}
            for stage, row in counts.items():
                left = rooms - sum(size for other, size in used.items() if other != stage)
                distinct, which = np.unique(row, axis=0, return_inverse=True)
                least = np.full(len(distinct), np.inf)
                np.minimum.at(least, which.ravel(), left)
                seconds[stage] = self.tables.least_seconds(
                    offered[stage], distinct, least, hardware[stage], limit
                )
        times = [seconds[stage] for stage in range(len(offered))]
        return self.tables.table.fastest([*map(np.isfinite, times)], times)

    def _options(self, cut: Sequence[int]) -> list[MixOptions]:
        bounds = pairwise([*cut, len(self.tables.points)])
        return [self.tables.options(*ends, at) for ends, at in zip(bounds, self.hardware)]
