"""Staged: one program with its layouts and states, in the stages of a pipeline.

    program = StagedProgram(laid, 8, request, regions, pins, KnownLines())
    way = program.fastest(schedule, PLAIN)      # its seconds, and the bytes that it holds at least
    way.candidate                               # with the program that it runs

A planner weighs many schedules, places of states and regions to recompute, of which few are worth a
program of their own. What a way takes is known from the sums of its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

from autopar.candidates.candidate import Candidate
from autopar.candidates.recomputation import PLAIN, Regions
from autopar.candidates.request import Request
from autopar.candidates.slice_times import time_slices
from autopar.capture.annotations import Pin
from autopar.cluster import Cluster
from autopar.errors import InvalidInput
from autopar.pipeline.memory.activation_counts import Live, peak_counts
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.step_price import price_step
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.stages.cut import choose_stages
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.pipeline.stages.stage_hardware import StageHardware
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.recompute import Recompute


@dataclass
class KnownLines:
    """Keep the costs of the stages of one program's layouts, for any states and schedule."""

    layouts: object = None  # held here, so that no others come to have their identity
    # By kind of recomputation, and bytes of the buffers by which states travel.
    lines: dict[tuple[Recompute, int], StageCosts] = field(default_factory=dict)


@dataclass(frozen=True)
class StagedWay:
    """A program in its stages, by one schedule, with some regions recomputed."""

    pipelining: Pipelining
    line: StageCosts
    peaks: Callable[[], Sequence[Live]]  # what its ranks keep when they keep most
    cluster: Cluster
    laid: Candidate  # the program, in no stages
    # Bytes that the devices of each place, and of each stage, have beyond what every device has.
    spare: Sequence[float]
    hardware: Sequence[StageHardware]

    @cached_property
    def timeline(self) -> Timeline:
        """Return the simulated step."""
        return price_step(self.pipelining, self.cluster)

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.timeline.seconds

    @cached_property
    def candidate(self) -> Candidate:
        """Return this way as a candidate, with the program that it runs."""
        search = self.laid.search
        return self.laid.changed(
            search and search.shared(self._schedule.ranks),
            self.pipelining,
            timeline=self.timeline,
            stage_costs=self.line.of(self.laid.flow),
        )

    def needed(self, memory: float) -> float:
        """Return the bytes that each device needs of its `memory`; `least`, if that is too much."""
        return self.least if self.least > memory else self.candidate.needed(memory)

    def fits(self, memory: float) -> bool:
        """Return whether each device has room, with `memory` bytes."""
        return self.needed(memory) <= memory

    @cached_property
    def spread(self) -> float:
        """Return the bytes of states on the fullest rank, if they were spread evenly."""
        held = self.line.held([(0, self.line.count)])
        return (held - sum(self.spare)) / self._schedule.ranks

    @cached_property
    def least(self) -> float:
        """Return the bytes that some rank holds at least: its states, and what it keeps for
        backward."""
        return self._fullest_rank(are_kept=True)

    @cached_property
    def barest(self) -> float:
        """Return the bytes that some rank holds at least, if forward kept nothing."""
        return self._fullest_rank(are_kept=False)

    @property
    def _schedule(self) -> Schedule:
        return self.pipelining.schedule

    def _fullest_rank(self, *, are_kept: bool) -> float:
        """Return the most bytes of a rank, with or without what forward keeps."""
        stages = self.pipelining.stages
        places = self.line.places
        starts = [places[stage.starts] for stage in stages]
        bounds = list(zip(starts, [*starts[1:], self.line.count]))
        # Gradients come when some of what is kept has gone.
        held = cache(lambda key: self.line.held([bounds[at] for at in key], gradients=False))
        most = 0.0
        for live in self.peaks():
            size = held(tuple(sorted(live)))
            for at, (whole, received, later, again, split) in live.items():
                size += are_kept * (whole * stages[at].activations + received * stages[at].receives)
                size += later * stages[at].weight_halves
                for is_split in (False,) * again + (True,) * split:
                    size += are_kept * self._remade(at, bounds[at], is_split=is_split)
            most = max(most, size - min(self.hardware[at].spare for at in live))
        return most

    def _remade(self, stage: int, bounds: tuple[int, int], *, is_split: bool) -> float:
        """Return the least bytes by which the backward of a stage exceeds what forward keeps."""
        return self.line.remade(*bounds, is_split=is_split)


class StagedProgram:
    """A program with its layouts and states, to be cut into stages."""

    def __init__(
        self,
        laid: Candidate,
        stages: int,
        request: Request,
        regions: Regions,
        pins: Sequence[Pin],
        known: KnownLines,
    ) -> None:
        """`known`: what is known of the same layouts with other states."""
        assert request.axis is not None
        self.laid, self.axis, self.mesh = laid, request.axis, request.whole_mesh(laid.mesh, stages)
        self.regions, self.pins, self._known = regions, pins, known
        self.programs = cache(lambda kind: laid.recomputed(regions.all(kind)))
        self.lines = cache(self._line)
        self.slice_times = cache(partial(time_slices, laid))
        self.memory = request.memory
        self.hardware = cache(lambda placed: tuple(laid.stage_hardware(placed, request.memory)))
        self.cut_ways = cache(self._ways)
        self._fastest = cache(
            lambda hardware, kind: tuple(
                choose_stages(self.lines(kind), len(hardware), pins=pins, hardware=hardware)
            )
        )

    def fastest(self, schedule: Schedule, kind: Recompute) -> StagedWay:
        """Return the fastest way. Stages are cut so that the slowest is fastest, with and without
        the seconds of messages: some schedules do other work meanwhile."""
        return min(self.cut_ways(schedule, kind), key=lambda way: way.seconds)

    def _ways(self, schedule: Schedule, kind: Recompute) -> list[StagedWay]:
        hardware = self.hardware(schedule.placement)
        cuts = [self._fastest(hardware, kind)]
        if self.lines(kind).waits(hardware):
            cuts.append(self._fastest(tuple(at.without_links for at in hardware), kind))
        return [self._way(schedule, kind, cut) for cut in dict.fromkeys(cuts)]

    def within(self, schedule: Schedule, kind: Recompute, memory: float) -> StagedWay | None:
        """Return the fastest way whose stages fit into memory, as far as their sums tell. None: no
        stages do."""
        ways = [way for way in self.cut_ways(schedule, kind) if way.fits(memory)]
        line, peaks = self.lines(kind), self._live(schedule, kind)
        with suppress(InvalidInput):
            cut = choose_stages(
                line,
                schedule.stages,
                pins=self.pins,
                memory=memory,
                peaks=peaks,
                hardware=self.hardware(schedule.placement),
            )
            ways.append(self._way(schedule, kind, cut))
        return min(ways, key=lambda way: way.seconds, default=None)

    def _way(self, schedule: Schedule, kind: Recompute, stages: Sequence[StageCost]) -> StagedWay:
        line = self.lines(kind)
        shared = line.shared_sums(stages)
        times = self.slice_times(schedule.slices)
        pipelining = Pipelining(self.axis, self.mesh, schedule, tuple(stages), shared, times)
        cluster, peaks = self.laid.cluster, partial(self._live, schedule, kind)
        spare = self.laid.spare(self.memory)
        hardware = self.hardware(schedule.placement)
        laid = self.programs(kind)
        return StagedWay(pipelining, line, peaks, cluster, laid, spare, hardware)

    def _live(self, schedule: Schedule, kind: Recompute) -> Sequence[Live]:
        return peak_counts(schedule, recompute=not kind.is_plain)

    def _line(self, kind: Recompute) -> StageCosts:
        known, laid = self._known.lines, self.laid
        key = kind, laid.states.buffer_bytes
        like = known.get(key)
        if like is not None and like.are_tied and not laid.has_copies:
            # Nothing else differs than what parameters take where they are.
            costs = [prices.stored for prices in laid.all_prices]
            line = like.restated(laid.decisions.apart, costs)
        else:
            # Copies of parameters are kept in other ways than parameters.
            like = None if laid.has_copies else like
            line = self.programs(kind).stage_costs(like, self._known_costs(kind))
        if not laid.has_copies:
            known.setdefault(key, line)
        return line

    def _known_costs(self, kind: Recompute) -> StageCosts | None:
        """Return the costs of the same layouts with other regions recomputed. None: they are not
        known. Where tensors are kept elsewhere, equal blocks are only seen in the plain program."""
        if not self.laid.has_copies and (known := self._known.lines):
            return next(iter(known.values()))
        return None if kind.keep == "device" else self.lines(PLAIN)
