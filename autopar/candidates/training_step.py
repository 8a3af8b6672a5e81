"""TrainingStep: a laid-out program that runs for each micro-batch, in stages or in none.

    step = TrainingStep(program, batches, pipelining)
    step.cost.seconds, step.memory.peak

What is known of the pipeline already is given, so that it is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.cluster.cluster_part import PipelineLine
from autopar.cluster.machines import HostLoad
from autopar.cost.copy_groups import copy_groups_of_nodes, live_copy_bytes
from autopar.cost.footprint import Memory
from autopar.cost.time_report import Cost
from autopar.mesh import Mesh
from autopar.passes.microbatches import Microbatches
from autopar.passes.stages import StageCut
from autopar.passes.token_cutter import sequence_gradients
from autopar.pipeline.memory.long_stages import bounds_by_place, in_three, taken_by_long_stages
from autopar.pipeline.memory.step_memory import StageMemory, peak_in_step
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import one_stage
from autopar.pipeline.simulation.step_price import (
    held_nodes,
    memory_by_place,
    pipeline_cost,
    price_step,
)
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.stages.held_parameters import HeldParameters
from autopar.pipeline.stages.stage_tables import StageCosts


@dataclass(frozen=True)
class TrainingStep:
    """A program, its micro-batches and its stages, and the figures of one step."""

    program: LaidOutProgram
    batches: Microbatches | None = None  # `program` is then that of one micro-batch
    pipelining: Pipelining | None = None
    # The simulated step, the costs of stages, and the stages, where they are known.
    known_timeline: Timeline | None = field(default=None, compare=False, repr=False)
    known_stage_costs: StageCosts | None = field(default=None, compare=False, repr=False)
    known_cut: StageCut | None = field(default=None, compare=False, repr=False)
    # What is held at each place of the pipeline, where that is known without a program.
    known_memories: Sequence[Memory] | None = field(default=None, compare=False, repr=False)
    # A step with other names of axes alone, whose figures are those of this one.
    renamed: TrainingStep | None = field(default=None, compare=False, repr=False)

    @property
    def whole_mesh(self) -> Mesh:
        """Return the mesh of all ranks, the axis of a pipeline among its axes."""
        return self.program.mesh if self.pipelining is None else self.pipelining.mesh

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a step runs, one after another."""
        return 1 if self.batches is None else self.batches.count

    @cached_property
    def timeline(self) -> Timeline | None:
        """Return the simulated step of a pipeline. None: there is no pipeline."""
        if self.pipelining is None or self.known_timeline is not None:
            return self.known_timeline
        return price_step(self.pipelining, self.program.machine_prices.cluster)

    @cached_property
    def stage_line(self) -> StageCosts:
        """Return the costs of stages, wherever the program is cut."""
        return self.known_stage_costs or self.program.stage_line

    @cached_property
    def holding(self) -> HeldParameters:
        """Return what its stages hold of parameters."""
        return HeldParameters(self.stage_line)

    @cached_property
    def cost(self) -> Cost:
        """Return the predicted seconds of one step, and their parts."""
        if self.renamed is not None:
            return self.renamed.cost
        if self.pipelining is not None and self.timeline is not None:
            return pipeline_cost(self.pipelining, self.program.run, self.timeline)
        return Cost.of(self.program.run, self.microbatches)

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of one step."""
        return self.cost.seconds if self.timeline is None else self.timeline.seconds

    @cached_property
    def memory(self) -> Memory:
        """Return the predicted bytes on the fullest device, and on the fullest host."""
        return Memory.fullest(self.memories)

    @cached_property
    def memories(self) -> Sequence[Memory]:
        """Return the predicted bytes of a rank at each place of the pipeline, or of all ranks."""
        if self.known_memories is not None:
            return self.known_memories
        if self.renamed is not None:
            return self.renamed.memories
        program, size = self.program, self.program.states.buffer_bytes
        if (pipelining := self.pipelining) is None:
            if (memory := program.program_memory) is None:
                return [program.held]
            peak = peak_in_step(one_stage(self.microbatches), 0, {0: memory})
            return [program.held.at_once(peak, self.passing_copies(0))]
        taken = self.taken_by_stages(pipelining)
        if program.captured.is_folded:
            bounds = bounds_by_place(self.stage_line, pipelining)
            nodes = [self.holding.by(stages) for stages in bounds]
            readers = in_three(program.flow).readers
        else:
            cut, places = self.cut(pipelining), range(pipelining.schedule.ranks)
            nodes = [dict.fromkeys(held_nodes(pipelining, cut, place), 1) for place in places]
            readers = cut.readers
        return memory_by_place(pipelining, nodes, taken, size, readers, program.captured.kept_bytes)

    def passing_copies(self, place: int) -> float:
        """Return the bytes of copies of parameters that live a use, at a place of the pipeline."""
        mesh, size = self.program.mesh, self.program.states.buffer_bytes
        if self.pipelining is None:
            groups = copy_groups_of_nodes(self.program.rewritten.nodes, mesh, size)
        else:
            cut = self.cut(self.pipelining)
            held = held_nodes(self.pipelining, cut, place)
            groups = copy_groups_of_nodes(held, mesh, size, cut.readers)
        return live_copy_bytes(groups, mesh)

    def place_of(self, rank: int) -> int:
        """Return the place of a rank along the axis of the pipeline."""
        axis = None if self.pipelining is None else self.pipelining.axis
        return 0 if axis is None else self.whole_mesh.coordinate(rank)[axis]

    def cut(self, pipelining: Pipelining) -> StageCut:
        """Return the program cut into the stages of a pipeline."""
        if self.known_cut is not None:
            return self.known_cut
        starts = [stage.starts for stage in pipelining.stages]
        return StageCut.at(self.program.flow, starts, pipelining.schedule.placement)

    def taken_by_stages(self, pipelining: Pipelining) -> dict[int, StageMemory]:
        """Return what each stage takes in a step. Equal stages are looked at once."""
        look_at, known = self.program.stage_memories, self.program.known_stages
        if self.program.captured.is_folded:
            return taken_by_long_stages(self.stage_line, pipelining, look_at, known)
        cut, split, taken = self.cut(pipelining), pipelining.schedule.split_stages, {}
        for index in range(cut.count):
            key = cut.bounds(index), cut.shared(index), index in split
            if key not in known:
                known[key] = look_at(cut, index, index in split)
            taken[index] = known[key]
        if pipelining.schedule.slices:  # these keep gradients of keys and values, too
            for index, memory in taken.items():
                nodes = cut.flow.activations[slice(*cut.bounds(index))]
                taken[index] = memory.keeping(sequence_gradients(nodes, self.program.mesh))
        return taken

    def room(self, limit: float | None) -> float:
        """Return the bytes of its fullest device under a limit. None: all that devices have."""
        prices = self.program.machine_prices
        limit = prices.cluster.device.usable_memory if limit is None else limit
        peaks = [memory.peak for memory in self.memories]
        return limit + prices.spare(limit)[peaks.index(max(peaks))]

    @cached_property
    def fullest_host(self) -> HostLoad:
        """Return the host with least room, with peaks of devices that have the same memory."""
        prices = self.program.machine_prices
        is_shared = self.memory.host > 0 and prices.cluster.device.host.is_device
        on_host = [memory.host + memory.peak * is_shared for memory in self.memories]
        line = None if self.pipelining is None else prices.line
        line = line or PipelineLine("", 1, self.program.mesh.size)
        return prices.cluster.fullest_host(line.by_rank(on_host))

    def needed(self, limit: float) -> float:
        """Return the bytes that every device needs, less what some have beyond `limit`."""
        spare = self.program.machine_prices.spare(limit)
        return max(memory.peak - more for memory, more in zip(self.memories, spare))

    def fits(self, limit: float) -> bool:
        """Return whether it has room, where each device has `limit` bytes."""
        return self.needed(limit) <= limit and self.fullest_host.room >= 0
