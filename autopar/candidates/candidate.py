"""Candidate: one way to run a step, and its price, whoever asks for it.

candidate = Candidate.laid_out(captured, cluster, decisions)
candidate.cost.seconds, candidate.memory.peak
candidate.placed(states), candidate.recomputed(regions)      # programs that are made from it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, overload

from autopar.candidates.alternative import Alternative
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.training_step import TrainingStep
from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.passes.microbatches import Microbatches
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.stages.stage_tables import StageCosts, price_stages
from autopar.recompute import Recompute, summary
from autopar.search.decisions import Decisions
from autopar.search.search_report import SearchReport
from autopar.search.smallest_footprint import SmallestFootprint
from autopar.states import States

T = TypeVar("T")


class OfStep(Generic[T]):
    """An attribute of a candidate that is one of its step."""

    def __init__(self, read: Callable[[TrainingStep], T]) -> None:
        self._read = read

    @overload
    def __get__(self, candidate: None, owner: type) -> Self: ...

    @overload
    def __get__(self, candidate: Candidate, owner: type) -> T: ...

    def __get__(self, candidate: Candidate | None, owner: type) -> Self | T:
        return self if candidate is None else self._read(candidate.step)


@dataclass(frozen=True)
class Candidate:
    """A program with its layouts, with a pipeline or without; seconds and bytes follow.

    Candidates that differ in the account of the search alone have the same `step`; candidates that
    differ in their stages have the same program in it.
    """

    step: TrainingStep
    search: SearchReport | None = None  # the account of the search, where there was one

    captured = OfStep(lambda step: step.program.captured)  # of one micro-batch, if it has several
    decisions = OfStep(lambda step: step.program.decisions)
    states = OfStep(lambda step: step.program.states)
    batches = OfStep(lambda step: step.batches)
    pipelining = OfStep(lambda step: step.pipelining)
    mesh = OfStep(lambda step: step.program.mesh)  # inside each stage
    whole_mesh = OfStep(lambda step: step.whole_mesh)
    microbatches = OfStep(lambda step: step.microbatches)
    precision = OfStep(lambda step: step.program.captured.example.precision)
    has_copies = OfStep(lambda step: step.program.has_copies)

    cluster = OfStep(lambda step: step.program.machine_prices.cluster)
    line = OfStep(lambda step: step.program.machine_prices.line)
    machines = OfStep(lambda step: step.program.machine_prices.machines)
    prices = OfStep(lambda step: step.program.machine_prices.slowest)
    all_prices = OfStep(lambda step: step.program.machine_prices.all_kinds)
    stage_hardware = OfStep(lambda step: step.program.machine_prices.stage_hardware)
    spare = OfStep(lambda step: step.program.machine_prices.spare)

    rewritten = OfStep(lambda step: step.program.rewritten)
    flow = OfStep(lambda step: step.program.flow)
    equal_blocks = OfStep(lambda step: step.program.equal_blocks)
    loss = OfStep(lambda step: step.program.loss)
    travel = OfStep(lambda step: step.program.travel)
    stage_costs = OfStep(lambda step: step.program.stage_costs)
    run = OfStep(lambda step: step.program.run)
    held = OfStep(lambda step: step.program.held)
    program_memory = OfStep(lambda step: step.program.program_memory)

    timeline = OfStep(lambda step: step.timeline)
    stage_line = OfStep(lambda step: step.stage_line)
    cut = OfStep(lambda step: step.cut)
    place_of = OfStep(lambda step: step.place_of)
    taken_by_stages = OfStep(lambda step: step.taken_by_stages)
    passing_copies = OfStep(lambda step: step.passing_copies)
    cost = OfStep(lambda step: step.cost)
    seconds = OfStep(lambda step: step.seconds)
    memories = OfStep(lambda step: step.memories)
    memory = OfStep(lambda step: step.memory)
    fullest_host = OfStep(lambda step: step.fullest_host)
    room = OfStep(lambda step: step.room)
    needed = OfStep(lambda step: step.needed)
    fits = OfStep(lambda step: step.fits)

    @classmethod
    def laid_out(
        cls,
        captured: Captured,
        cluster: Cluster,
        decisions: Decisions,
        batches: Microbatches | None = None,
        *,
        line: PipelineLine | None = None,
    ) -> Self:
        """Return the candidate of a program with whole states, which is made from no other.

        `captured` is the program of one micro-batch, where there are `batches`. `line`: the places
        of a pipeline, if it is to be cut into stages.
        """
        program = LaidOutProgram.of(captured, cluster, decisions, line=line)
        return cls(TrainingStep(program, batches))

    def with_program(self, **changes: Any) -> Self:
        """Return this candidate with other arguments of `LaidOutProgram.of`, all computed anew."""
        step, program = self.step, self.step.program
        arguments: dict[str, Any] = {
            "captured": program.captured,
            "cluster": program.machine_prices.cluster,
            "decisions": program.decisions,
            "states": program.states,
            "line": program.machine_prices.line,
        }
        changed = LaidOutProgram.of(**arguments | changes)
        return replace(self, step=TrainingStep(changed, step.batches, step.pipelining))

    def changed(
        self,
        search: SearchReport | None,
        pipelining: Pipelining | None = None,
        *,
        timeline: Timeline | None = None,
        stage_costs: StageCosts | None = None,
    ) -> Self:
        """Return the same program with another account of the search, or in other stages.

        `timeline` and `stage_costs` are what is known of these stages.
        """
        if pipelining is None:
            return replace(self, search=search)
        program, batches = self.step.program, self.step.batches
        step = TrainingStep(program, batches, pipelining, timeline, stage_costs)
        return replace(self, step=step, search=search)

    def placed(self, states: States) -> Self:
        """Return the same layouts with the states of parameters in other places."""
        return self._of(self.step.program.with_states(states))

    def recomputed(self, decided: Mapping[str, Recompute]) -> Self:
        """Return the same layouts with other regions recomputed."""
        return self._of(self.step.program.with_recomputation(decided))

    def _of(self, program: LaidOutProgram) -> Self:
        if program is self.step.program:
            return self
        step = TrainingStep(program, self.step.batches, self.step.pipelining)
        return replace(self, step=step)

    def cut_as(self, like: Pipelining) -> Self:
        """Return this program in the stages of `like`, with what they take here."""
        starts = [stage.starts for stage in like.stages]
        hardware = self.stage_hardware(like.schedule.placement, math.inf)
        costs = self.stage_costs()
        stages = tuple(price_stages(costs, starts, hardware))
        pipelining = replace(like, stages=stages, shared=costs.shared_sums(stages))
        return self.changed(self.search, pipelining, stage_costs=costs)

    def alternative(self, limit: float) -> Alternative:
        """Return the figures, for those who have `limit` bytes on each device."""
        schedule = None if self.pipelining is None else self.pipelining.schedule
        return Alternative(
            mesh=self.whole_mesh,
            microbatches=self.microbatches if schedule is None else schedule.microbatches,
            schedule="" if schedule is None else schedule.name,
            options=() if schedule is None else schedule.options,
            seconds=self.seconds,
            memory=self.memory.peak,
            fits=self.fits(limit),
            cost=self.cost,
            held=self.memory,
            recompute=summary(self.decisions.recompute),
            states=self.states,
            axis="" if self.pipelining is None else self.pipelining.axis,
        )

    def footprint(self, figures: Alternative) -> SmallestFootprint:
        """Return what this way, with its figures, needs, for those who have less."""
        how = f"{figures.mesh} with {figures.schedule}" if figures.schedule else f"{figures.mesh}"
        how += ", recomputed" if figures.recompute else ""
        how += "" if self.states.is_whole else f", states {self.states}"
        memory = self.memory
        states = memory.parameters + memory.gradients + memory.optimizer
        return SmallestFootprint(how, figures.mesh.size, memory.peak, states, figures.microbatches)
