"""Candidate: one way to run a step, and its price, whoever asks for it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torch import fx

from autopar.candidates.alternative import Alternative
from autopar.candidates.state_places import state_places
from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import ClusterPart, PipelineLine
from autopar.cluster.machines import HostLoad
from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.copy_groups import copy_groups_of_nodes, live_copy_bytes
from autopar.cost.footprint import Memory, program_memory
from autopar.cost.host_kernels import HostKernels
from autopar.cost.repeats import NO_EQUAL_BLOCKS, EqualBlocks
from autopar.cost.saved_tensors import SavedBytesCache
from autopar.cost.time_report import Cost, NodePrices, RunCost, program_run_cost
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes import change_recomputation, change_state_places, rewrite
from autopar.passes.flow import Flow, flow_of
from autopar.passes.microbatches import Microbatches
from autopar.passes.stages import StageCut
from autopar.pipeline.memory.alike_stages import StageMemories
from autopar.pipeline.memory.long_stages import bounds_by_place, in_three, taken_by_long_stages
from autopar.pipeline.memory.step_memory import StageMemory, peak_in_step
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import one_stage
from autopar.pipeline.simulation.message_costs import Placement, hardware_of_stages
from autopar.pipeline.simulation.step_price import (
    held_nodes,
    memory_by_place,
    pipeline_cost,
    price_step,
)
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.stages.held_parameters import HeldParameters
from autopar.pipeline.stages.stage_hardware import StageHardware
from autopar.pipeline.stages.stage_tables import StageCosts, price_stages
from autopar.precision import Precision
from autopar.recompute import Recompute, summary
from autopar.search.decisions import Decisions
from autopar.search.search_report import SearchReport
from autopar.search.smallest_footprint import SmallestFootprint
from autopar.states import WHOLE, States


@dataclass(frozen=True)
class Candidate:
    """A program with its layouts, with a pipeline or without; seconds and bytes follow."""

    captured: Captured
    cluster: Cluster
    decisions: Decisions
    batches: Microbatches | None = None  # `captured` is then the program of one micro-batch
    pipelining: Pipelining | None = None  # `mesh` is then the mesh inside each stage
    search: SearchReport | None = None  # the account of the search, where there was one
    states: States = WHOLE  # what the places of `decisions` follow from
    line: PipelineLine | None = None  # the places of a pipeline, if it is to be cut into stages

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks, the axis of a pipeline among its axes."""
        return self.mesh if self.pipelining is None else self.pipelining.mesh

    @property
    def precision(self) -> Precision | None:
        """In which dtypes it computes, if not in those of the model."""
        return self.captured.example.precision

    @property
    def microbatches(self) -> int:
        """How many micro-batches a step runs, one after another."""
        return 1 if self.batches is None else self.batches.count

    @cached_property
    def prices(self) -> NodePrices:
        """What its nodes take."""
        return NodePrices(self.machines, self.mesh, self.states.buffer_bytes)

    @cached_property
    def machines(self) -> Cluster:
        """What layouts are chosen for: no place of a pipeline is faster."""
        return self.cluster if self.line is None else ClusterPart.of(self.cluster, self.line)

    @cached_property
    def _kinds(self) -> tuple[list[NodePrices], list[int]]:
        """The prices on each kind of machines, and of which kind each place is."""
        if not isinstance(self.machines, ClusterPart):
            return [self.prices], [0]
        parts, kinds = self.machines.kinds(self.mesh)
        if len(parts) == 1:
            return [self.prices], kinds
        size = self.states.buffer_bytes
        return [NodePrices(part, self.mesh, size) for part in parts], kinds

    @property
    def all_prices(self) -> list[NodePrices]:
        """What its nodes take on each kind of machines."""
        return self._kinds[0]

    def stage_hardware(self, placement: Placement, limit: float) -> list[StageHardware]:
        """Where stages stand; `limit`: the bytes of each device that a plan keeps to."""
        assert self.line is not None
        spare = self.spare(limit)
        return hardware_of_stages(placement, self.cluster, self.line, self._kinds[1], spare)

    def spare(self, limit: float) -> list[float]:
        """The bytes that the devices of each place have beyond `limit`, if it is what all have."""
        return [0.0] if self.line is None else self.cluster.spare(limit, self.line.ranks)

    @cached_property
    def rewritten(self) -> fx.Graph:
        """The program of all ranks."""
        if self._source is not None:
            about = self.captured, self.decisions, self.prices.price
            source, is_same = self._source.rewritten, not self.decisions.apart
            return source if is_same else change_state_places(source, *about)
        return rewrite(self.captured, self.decisions, self.prices.price, verify_each=False)

    @cached_property
    def _source(self) -> Candidate | None:
        """The same with states that are whole, of which this is made."""
        return None

    @cached_property
    def flow(self) -> Flow:
        """The same as a line of activations, to be cut into stages."""
        if self._source is not None and self._knows_flow:
            return self._source.flow.moved_to(self.rewritten)
        return flow_of(self.captured, self.rewritten)

    @cached_property
    def repeats(self) -> EqualBlocks:
        """The equal blocks of the program."""
        return self.flow.repeats if "flow" in vars(self) else EqualBlocks.of(self.rewritten)

    @property
    def _knows_flow(self) -> bool:
        """Whether it was looked at, here or where the same calls read whole states."""
        source = self._source
        is_there = source is not None and not self.has_copies and "flow" in vars(source)
        return is_there or "flow" in vars(self)

    @property
    def _shared_prices(self) -> dict[str, Any]:
        """What is the same on the same machines."""
        return {"prices": self.prices, "machines": self.machines, "_kinds": self._kinds}

    def changed(self, search: SearchReport | None, pipelining: Pipelining | None = None) -> Self:
        """The same program, found so and in these stages; it is not rewritten again."""
        made = replace(self, search=search, pipelining=pipelining or self.pipelining)
        names = "rewritten", "flow", "run", "_forms", "_taken", "_look_at"
        known = vars(self) if pipelining is None else {n: getattr(self, n) for n in names}
        vars(made).update({**self._shared_prices, **known, "search": search})
        return made

    def placed(self, states: States) -> Self:
        """The same program with the states of its parameters in these places."""
        if states == self.states:
            return self
        if self.decisions.apart:  # where gradients are summed is read from whole states
            whole = replace(self, decisions=replace(self.decisions, apart={}), states=WHOLE)
            return whole.placed(states)
        apart = {} if states.is_whole else state_places(self.rewritten, states, self.mesh)
        made = replace(self, decisions=replace(self.decisions, apart=apart), states=states)
        vars(made).update(_source=self)
        if states.buffer_bytes == self.states.buffer_bytes:
            vars(made).update(self._shared_prices)
        if not made.has_copies:
            vars(made).update(_forms=self._forms)  # the same calls
        return made

    def recomputed(self, decided: Mapping[str, Recompute]) -> Self:
        """The same layouts, with other regions recomputed."""
        if decided == self.decisions.recompute:
            return self
        decisions = replace(self.decisions, recompute=dict(decided))
        made = replace(self, decisions=decisions)
        repeats = NO_EQUAL_BLOCKS if self.decisions.recompute else self.repeats
        price, program = self.prices.price, self.rewritten
        graph = change_recomputation(program, self.captured, decisions, price, repeats)
        vars(made).update(self._shared_prices, _forms=self._forms, rewritten=graph)
        if self._knows_flow:
            vars(made)["flow"] = self.flow.moved_to(graph)
        return made

    def stage_costs(
        self, like: StageCosts | None = None, beside: StageCosts | None = None
    ) -> StageCosts:
        """Cut it by `like`, of equal layouts with other states, `beside`, recomputed otherwise."""
        costs = [prices.along(self.flow.repeats) for prices in self.all_prices]
        return StageCosts(self.flow, self.mesh, costs, same_program=like, same_layouts=beside)

    def cut_as(self, given: Pipelining) -> Candidate:
        """This program in the stages of a pipeline, with what they take here."""
        starts = [stage.starts for stage in given.stages]
        hardware = self.stage_hardware(given.schedule.placement, math.inf)
        costs = self.stage_costs()
        stages = tuple(price_stages(costs, starts, hardware))
        shared = costs.shared_sums(stages)
        return self.changed(self.search, replace(given, stages=stages, shared=shared))

    @cached_property
    def timeline(self) -> Timeline | None:
        """The simulated step of a pipeline."""
        return None if self.pipelining is None else price_step(self.pipelining, self.cluster)

    @cached_property
    def run(self) -> RunCost:
        """What one micro-batch takes, through all stages."""
        return program_run_cost(self.rewritten, self.prices, self.repeats)

    @cached_property
    def cost(self) -> Cost:
        """The predicted seconds of one step, and their parts."""
        if self.pipelining is not None and self.timeline is not None:
            return pipeline_cost(self.pipelining, self.run, self.timeline)
        return Cost.of(self.run, self.microbatches)

    @cached_property
    def memory(self) -> Memory:
        """The predicted bytes on the fullest device, and on the fullest host."""
        return Memory.fullest(self.memories)

    def room(self, limit: float | None) -> float:
        """Return the bytes of its fullest device under a limit. None: all that devices have."""
        limit = self.cluster.device.memory if limit is None else limit
        peaks = [memory.peak for memory in self.memories]
        return limit + self.spare(limit)[peaks.index(max(peaks))]

    @cached_property
    def memories(self) -> list[Memory]:
        """The predicted bytes of a rank at each place of the pipeline; without one there is one."""
        if (cut := self.pipelining) is not None:
            taken, size = self.taken_by_stages(cut), self.states.buffer_bytes
            kept = self.captured.kept_bytes
            if self.captured.times > 1:
                own = [self.holding.by(one) for one in bounds_by_place(self.stage_line, cut)]
                return memory_by_place(cut, own, taken, size, in_three(self.flow).readers, kept)
            there = self.cut(cut)
            own = [dict.fromkeys(held_nodes(cut, there, n), 1) for n in range(cut.schedule.ranks)]
            return memory_by_place(cut, own, taken, size, there.readers, kept)
        if (program := self.program_memory) is None:
            return [self.held]
        made = peak_in_step(one_stage(self.microbatches), 0, {0: program})
        return [self.held.at_once(made, self.passing_copies(0))]

    @cached_property
    def held(self) -> Memory:
        """What its program holds as it is, in no stages: the most of each kind."""
        size, known = self.states.buffer_bytes, self._known_kept
        memory = program_memory(self.rewritten, self.mesh, size, known=known)
        return memory.keeping(self.captured.kept_bytes)

    @cached_property
    def program_memory(self) -> StageMemory | None:
        """What the program takes in a step as it is, in no stages, if it has a loss."""
        if (loss := self.loss) is None:
            return None
        return StageMemory.of(
            self.rewritten, self.mesh, [loss], self.travel, known=self._known_kept
        )

    @cached_property
    def _known_kept(self) -> SavedBytesCache:
        """What its calls keep, each of equal blocks looked at once."""
        return SavedBytesCache(self.mesh, self.repeats)

    def passing_copies(self, place: int) -> float:
        """Of one of `memories`, the bytes of copies of parameters that live a use."""
        about = self.mesh, self.states.buffer_bytes
        if self.pipelining is None:
            return live_copy_bytes(copy_groups_of_nodes(self.rewritten.nodes, *about), self.mesh)
        cut = self.cut(self.pipelining)
        held = held_nodes(self.pipelining, cut, place)
        return live_copy_bytes(copy_groups_of_nodes(held, *about, cut.readers), self.mesh)

    def place_of(self, rank: int) -> int:
        """Of a rank along the axis of the pipeline."""
        axis = None if self.pipelining is None else self.pipelining.axis
        return 0 if axis is None else self.whole_mesh.coordinate(rank)[axis]

    def cut(self, pipelining: Pipelining) -> StageCut:
        """Its stages."""
        starts = [stage.starts for stage in pipelining.stages]
        return StageCut.at(self.flow, starts, pipelining.schedule.placement)

    def taken_by_stages(self, pipelining: Pipelining) -> dict[int, StageMemory]:
        """What its stages take in a step. Those that start and end alike are looked at once."""
        split = pipelining.schedule.split_stages
        if self.captured.times > 1:
            return taken_by_long_stages(self.stage_line, pipelining, self._look_at, self._taken)
        cut = self.cut(pipelining)
        found = {}
        for index in range(cut.count):
            key = cut.bounds(index), cut.shared(index), index in split
            if key not in self._taken:
                self._taken[key] = self._look_at(cut, index, index in split)
            found[index] = self._taken[key]
        return found

    @cached_property
    def stage_line(self) -> StageCosts:
        """The program, to be cut into stages."""
        return self.stage_costs()

    @cached_property
    def holding(self) -> HeldParameters:
        """What its stages hold."""
        return HeldParameters(self.stage_line)

    @cached_property
    def _taken(self) -> dict[Hashable, StageMemory]:
        """What stages take, by cut points, readers of their parameters, and a split backward."""
        return {}

    @cached_property
    def _look_at(self) -> StageMemories:
        """Tells what a stage takes."""
        return StageMemories(self.mesh, self.travel, self._forms)

    @cached_property
    def _forms(self) -> dict[str, int]:
        """The forms of its calls by name, as they become known."""
        return {}

    @property
    def travel(self) -> BucketConfig:
        """How gradients of parameters travel, from which kernels."""
        kernels = HostKernels.here() if self.cluster.device.host.is_device else None
        return BucketConfig(self.states.buffer_bytes, kernels)

    @property
    def loss(self) -> fx.Node | None:
        """What a step differentiates, in the rewritten program, if it knows."""
        with suppress(InvalidInput):
            index = self.captured.loss_index
            return self.rewritten.output_node().args[0][index]  # type: ignore[index,return-value]
        return None

    @property
    def seconds(self) -> float:
        """Predicted for a step."""
        return self.cost.seconds if self.timeline is None else self.timeline.step_time

    @property
    def has_copies(self) -> bool:
        """Whether readers start from copies of parameters that are gathered."""
        return any(at.storage != at.working for at in self.decisions.apart.values())

    @cached_property
    def fullest_host(self) -> HostLoad:
        """The host with least room, with peaks of devices where these have the same memory."""
        is_shared = self.memory.host > 0 and self.cluster.device.host.is_device
        kept = [memory.host + memory.peak * is_shared for memory in self.memories]
        line = None if self.pipelining is None else self.line
        return self.cluster.fullest_host(
            (line or PipelineLine("", 1, self.mesh.size)).by_rank(kept)
        )

    def needed(self, limit: float) -> float:
        """Return the bytes that every device needs, less what some have beyond `limit`."""
        return max(one.peak - more for one, more in zip(self.memories, self.spare(limit)))

    def fits(self, limit: float) -> bool:
        """Whether it has room, where each device has `limit` bytes."""
        return self.needed(limit) <= limit and self.fullest_host.room >= 0

    def alternative(self, limit: float) -> Alternative:
        """The figures, for those who have `limit` bytes on each device."""
        made = None if self.pipelining is None else self.pipelining.schedule
        return Alternative(
            mesh=self.whole_mesh,
            microbatches=self.microbatches if made is None else made.microbatches,
            schedule="" if made is None else made.name,
            options=() if made is None else made.options,
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
        """What this way, with its figures, needs, told to who has less."""
        how = f"{figures.mesh} with {figures.schedule}" if figures.schedule else f"{figures.mesh}"
        how += ", recomputed" if figures.recompute else ""
        how += "" if self.states.is_whole else f", states {self.states}"
        memory = self.memory
        states = memory.parameters + memory.gradients + memory.optimizer
        return SmallestFootprint(how, figures.mesh.size, memory.peak, states, figures.microbatches)
