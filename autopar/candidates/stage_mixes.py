"""Stage mixes: stages of a pipeline in each of which as many regions run again as its memory asks.

    mixes = StageMixes(program, whole)
    way = mixes.fastest(schedule, memory)    # None: even the leanest does not fit
    way.decided                              # what runs again, by name of the regions
    way.candidate                            # the real program; it is made now
    mixes.real(way, memory)                  # the same, or another if this does not fit after all

The first rank of 1F1B keeps as many micro-batches as there are stages, and the last rank one: where
all regions are treated alike, most ranks have memory left. Where each rank has one stage, cuts and
mixes are chosen together. Stages that share the memory of a rank get mixes for several cuts, and
then a cut for the memory that each has beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from autopar.candidates.candidate import Candidate
from autopar.candidates.recomputation import KINDS
from autopar.candidates.staged import StagedProgram, StagedWay
from autopar.candidates.unfolded import with_program
from autopar.candidates.whole import Whole
from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.mix_problem import MixProblem, StageMix
from autopar.pipeline.stages.mixed_stages import Array, MixedStages, regions_of
from autopar.pipeline.stages.pins import pinned_points
from autopar.recompute import Recompute

LEANEST_FIRST = KINDS[::-1]
ATTEMPTS = 4  # at a mix of which the real program fits


@dataclass(frozen=True)
class MixedWay(StagedWay):
    """A program in its stages, by one schedule, with some regions of each stage recomputed."""

    decided: dict[str, Recompute]  # by name of the regions of the whole program
    expected: Sequence[float]  # bytes, of each rank
    make: Callable[[dict[str, Recompute], Pipelining], Candidate]

    @cached_property
    def candidate(self) -> Candidate:
        """Return the real program, priced again."""
        return self.make(self.decided, self.pipelining)

    def needed(self, memory: float) -> float:
        """Return the bytes that the way is expected to need of each device, less what some have
        more."""
        return max(size - more for size, more in zip(self.expected, self.spare))

    def _remade(self, stage: int, bounds: tuple[int, int], *, is_split: bool) -> float:
        return self.pipelining.stages[stage].remade


@dataclass(frozen=True)
class _Surplus:
    """Bytes by rank that a program needs beyond what is summed up, as it is there for a moment."""

    base: Array  # where all regions run in the leanest way
    slopes: Array  # for each region that runs in a later way


def _peaks(candidate: Candidate) -> Array:
    return np.array([memory.peak for memory in candidate.memories])


class StageMixes:
    """Chooses the stages of a program, and what runs again in each of them."""

    def __init__(self, program: StagedProgram, whole: Whole | None) -> None:
        """`whole`: the program that this one stands for, if it does."""
        self._program = program
        self._whole = whole if program.laid.captured.is_folded else None
        self._tables = cache(self._tables_of)
        self._surplus: dict[Schedule, _Surplus] = {}

    def fastest(
        self, schedule: Schedule, memory: float, cutoff: float = math.inf
    ) -> MixedWay | None:
        """Return the fastest way that is expected to fit into memory; None: none does.

        Of ways that take `cutoff` seconds or more, what is there for a moment is not looked at.
        """
        program = self._program
        if program.fastest(schedule, LEANEST_FIRST[0]).barest > memory:
            return None
        if schedule not in self._surplus:
            zeros = np.zeros((schedule.ranks, len(LEANEST_FIRST) - 1))
            way = self._fastest(schedule, memory, _Surplus(zeros[:, 0], zeros))
            if way is None or way.seconds >= cutoff:
                return way
            self._surplus[schedule] = self._surplus_of(schedule)
        return self._fastest(schedule, memory, self._surplus[schedule])

    def real(self, way: MixedWay, memory: float, cutoff: float = math.inf) -> Candidate | None:
        """Return the real program of a way that fits: of this one or, if it is refused, of another.

        None: all that fit take `cutoff` seconds or more.
        """
        schedule, attempt = way.pipelining.schedule, way
        for _ in range(ATTEMPTS):
            candidate = attempt.candidate
            if candidate.seconds >= cutoff:
                return None
            if candidate.fits(memory):
                return candidate
            self.note(attempt)
            next_way = self.fastest(schedule, memory)
            if next_way is None or next_way.seconds >= cutoff:
                return None
            attempt = next_way
        return None

    def outline(self, way: MixedWay) -> Candidate:
        """Return a stand-in for the real program, with the seconds and bytes of the mix."""
        leanest = self._program.fastest(way.pipelining.schedule, LEANEST_FIRST[0]).candidate
        memories = [
            replace(
                memory,
                at_peak=replace(memory.at_peak, activations=memory.at_peak.activations + more),
            )
            for memory, more in zip(leanest.memories, (way.expected - _peaks(leanest)).tolist())
        ]
        stand_in = leanest.changed(leanest.search, way.pipelining, timeline=way.timeline)
        return replace(stand_in, step=replace(stand_in.step, known_memories=memories))

    def note(self, way: MixedWay) -> None:
        """Remember what the real program needs beyond what was expected."""
        schedule = way.pipelining.schedule
        more = np.maximum(_peaks(way.candidate) - np.array(way.expected), 0)
        known = self._surplus[schedule]
        self._surplus[schedule] = replace(known, base=known.base + more)

    def _fastest(self, schedule: Schedule, memory: float, surplus: _Surplus) -> MixedWay | None:
        rooms = memory + np.array(self._program.laid.spare(self._program.memory)) - surplus.base
        problem = self._problem(schedule, rooms, surplus.slopes)
        ways = [self._way(problem, mix, surplus) for mix in self._mixes(problem)]
        return min(ways, key=lambda way: way.seconds, default=None)

    def _problem(self, schedule: Schedule, rooms: Array, slopes: Array) -> MixProblem:
        hardware = self._program.hardware(schedule.placement)
        return MixProblem(self._tables(schedule.stages), schedule, hardware, rooms, slopes)

    def _surplus_of(self, schedule: Schedule) -> _Surplus:
        """Return what programs need that treat all regions alike."""
        zeros = np.zeros((schedule.ranks, len(LEANEST_FIRST) - 1))
        problem = self._problem(schedule, zeros[:, 0], zeros)
        extra, counts = list[Array](), list[Array]()
        for number, kind in enumerate(LEANEST_FIRST):
            way = self._program.fastest(schedule, kind)
            cut = self._cut_of(way)
            extra.append(_peaks(way.candidate) - problem.bytes(problem.uniform(cut, number)))
            counts.append(np.maximum(problem.regions(cut), 1))
        slopes = [(surplus - extra[0]) / count for surplus, count in zip(extra[1:], counts[1:])]
        return _Surplus(extra[0], np.stack(slopes, axis=1))

    def _tables_of(self, stages: int) -> MixedStages:
        program = self._program
        lines = [program.lines(kind) for kind in LEANEST_FIRST]
        free = program.regions.free
        regions = regions_of(
            lines[0], free, free if self._whole is None else self._whole.regions.free
        )
        fixed = pinned_points(lines[0], program.pins, stages)
        cuts = {point for line in lines for point in line.cut_points(stages, fixed)}
        return MixedStages(lines, regions, cuts)

    def _mixes(self, problem: MixProblem) -> list[StageMix]:
        """Return mixes of cuts that may be the fastest."""
        program, tables, schedule = self._program, problem.tables, problem.schedule
        mixed: list[StageMix] = []
        if problem.is_shared:
            ways = (way for kind in LEANEST_FIRST for way in program.cut_ways(schedule, kind))
            cuts = dict.fromkeys(map(self._cut_of, ways))
            mixes = [mix for cut in cuts if (mix := problem.mix(cut)) is not None]
            if not mixes:
                return []
            mixed.append(min(mixes, key=problem.period))
        fixed = pinned_points(tables.lines[0], program.pins, schedule.stages)
        offered, known = tables.offered(schedule.stages, fixed), mixed[0] if mixed else None
        leanest = self._cut_of(program.fastest(schedule, LEANEST_FIRST[0]))
        limit = tables.slowest(leanest, problem.hardware)
        for hardware in {problem.hardware, tuple(at.without_links for at in problem.hardware)}:
            cut = problem.cut(offered, hardware, known, limit)
            if cut is None and known is None:  # the leanest does not fit in its fastest stages
                cut = problem.cut(offered, hardware)
            if cut is not None and (mix := problem.mix(cut)) is not None:
                mixed.append(mix)
        return mixed

    def _cut_of(self, way: StagedWay) -> tuple[int, ...]:
        stages, places = way.pipelining.stages, way.line.places
        number = self._tables(len(stages)).place
        return tuple(number[places[stage.starts]] for stage in stages)

    def _way(self, problem: MixProblem, mix: StageMix, surplus: _Surplus) -> MixedWay:
        program, schedule, line = self._program, problem.schedule, problem.tables.lines[0]
        numbers = problem.tables.ways_of(mix.cut, mix.ends)
        stages = problem.tables.stages(mix.cut, numbers, problem.hardware)
        stages = [replace(stage, remade=size) for stage, size in zip(stages, mix.remade)]
        pipelining = Pipelining(
            program.axis,
            program.mesh,
            schedule,
            tuple(stages),
            line.shared_sums(stages),
            program.slice_times(schedule.slices),
        )
        kinds = {name: LEANEST_FIRST[number] for name, number in numbers.items()}
        decided = {name: kind for name, kind in kinds.items() if not kind.is_plain}
        return MixedWay(
            pipelining,
            line,
            partial(peak_counts, schedule, recompute=True),
            program.laid.cluster,
            program.laid,
            program.laid.spare(program.memory),
            problem.hardware,
            decided,
            (problem.bytes(mix) + surplus.base).tolist(),
            self._candidate,
        )

    def _candidate(self, decided: dict[str, Recompute], pipelining: Pipelining) -> Candidate:
        program, whole = self._program, self._whole
        search = program.laid.search and program.laid.search.shared(pipelining.schedule.ranks)
        if whole is None:
            mixed = program.laid.recomputed(program.regions.fixed | decided)
            return mixed.changed(search).cut_as(pipelining)
        laid = program.programs(LEANEST_FIRST[0])
        costs = program.lines(LEANEST_FIRST[0]).of(laid.flow)
        leanest = laid.changed(search, pipelining, stage_costs=costs)
        long_program, batches = whole.program(program.laid.batches)
        recomputed = whole.regions.fixed | decided
        return with_program(leanest, long_program, batches, recomputed)
