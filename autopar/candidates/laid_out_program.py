"""LaidOutProgram: a captured program with its layouts, rewritten for all ranks.

    program = LaidOutProgram.of(captured, cluster, decisions)
    program.rewritten                        # the graph that all ranks run
    program.with_states(NAMED["zero3"])      # the same layouts, with other places of parameters
    program.with_recomputation(regions)      # the same layouts, with other regions recomputed

A program that is made from another one names it as its `source`, and derives from it what both
have in common: the rewritten graph, its flow, and the prices of its nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from autopar.candidates.machine_prices import MachinePrices
from autopar.candidates.state_places import main_axes, state_places
from autopar.capture.captured import Captured
from autopar.capture.verifier import verify
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.footprint import Memory, program_memory
from autopar.cost.host_kernels import HostKernels
from autopar.cost.saved_tensors import SavedBytesCache
from autopar.cost.time_report import RunCost, program_run_cost
from autopar.errors import InvalidInput
from autopar.layout import ParameterPlacement
from autopar.mesh import Mesh
from autopar.passes import change_recomputation, change_state_places, rewrite
from autopar.passes.flow import Flow, flow_of
from autopar.passes.pass_context import RewriteContext
from autopar.passes.recompute_marks import mark_recomputed
from autopar.pipeline.memory.alike_stages import StageMemories
from autopar.pipeline.memory.step_memory import StageMemory
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.program.equal_blocks import EqualBlocks, is_regular
from autopar.program.written_out import write_out
from autopar.recompute import Recompute
from autopar.search.decisions import Decisions
from autopar.states import WHOLE, States, split_mesh


@dataclass(frozen=True)
class LaidOutProgram:
    """A program of one micro-batch, what is decided of it, and what follows from that alone."""

    captured: Captured
    decisions: Decisions
    machine_prices: MachinePrices
    states: States = WHOLE  # what the places of `decisions` follow from
    learns: bool = True  # whether it is differentiated, where it is cut into stages
    # The program of the same layouts that this one is made from.
    source: LaidOutProgram | None = field(default=None, compare=False, repr=False)
    # The program in which a block stands for several, of which this one has all.
    folded: LaidOutProgram | None = field(default=None, compare=False, repr=False)
    # The forms of its calls by name, as they become known; shared by programs of the same calls.
    forms: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        captured: Captured,
        cluster: Cluster,
        decisions: Decisions,
        *,
        states: States = WHOLE,
        line: PipelineLine | None = None,
    ) -> LaidOutProgram:
        """Return a program that is made from no other; `line`: the places of its pipeline."""
        prices = MachinePrices(cluster, decisions.mesh, states.buffer_bytes, line)
        return cls(captured, decisions, prices, states)

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh

    @property
    def has_copies(self) -> bool:
        """Return whether readers start from copies of parameters that are gathered."""
        return any(at.storage != at.working for at in self.decisions.apart.values())

    @cached_property
    def rewritten(self) -> fx.Graph:
        """Return the program of all ranks."""
        captured, decisions = self.captured, self.decisions
        price = self.machine_prices.slowest.price
        if (folded := self.folded) is not None:
            plain = folded.with_recomputation({})
            if plain.is_regular:
                context = RewriteContext(captured, decisions, price)
                graph = mark_recomputed(write_out(plain.rewritten), context)
                verify(graph, "moved", self.mesh)
                return graph
        if (source := self.source) is None:
            return rewrite(captured, decisions, price, verify_each=False)
        if decisions.recompute != source.decisions.recompute:
            return change_recomputation(source.rewritten, captured, decisions, price)
        if decisions.apart != source.decisions.apart:
            return change_state_places(source.rewritten, captured, decisions, price)
        return source.rewritten

    @cached_property
    def is_regular(self) -> bool:
        """Return whether each block that stands for several is between two that are equal to it."""
        return is_regular(self.rewritten)

    @cached_property
    def flow(self) -> Flow:
        """Return the rewritten program as a row of activations, to be cut into stages."""
        source = self.source
        if source is None or self.has_copies != source.has_copies or self.learns != source.learns:
            flow = flow_of(self.captured, self.rewritten, learns=self.learns)
        elif self.rewritten is source.rewritten:
            return source.flow
        else:
            flow = source.flow.moved_to(self.rewritten)
        if "equal_blocks" not in vars(self):  # they are found when somebody reads them
            return flow
        return replace(flow, known={**flow.known, "equal_blocks": self.equal_blocks})

    @cached_property
    def equal_blocks(self) -> EqualBlocks:
        """Return the equal blocks of the program."""
        return EqualBlocks.of(self.rewritten)

    def with_states(self, states: States) -> LaidOutProgram:
        """Return the program of the same layouts with its parameters in the places of `states`."""
        if states == self.states:
            return self
        if self.decisions.apart:  # where gradients are summed is read from whole states
            whole = replace(self._in_places({}, WHOLE), source=None)
            return whole.with_states(states)
        if states.numbers and (split := self._split_for(states)) is not self:
            return split.with_states(states)
        apart = {} if states.is_whole else state_places(self.rewritten, states, self.mesh)
        return self._in_places(apart, states)

    def _split_for(self, states: States) -> LaidOutProgram:
        """Return the same layouts on a mesh whose axes are split as far as states ask for some of
        their ranks; refuse states that no axis can be split for."""
        mesh, _ = split_mesh(states, main_axes(self.rewritten, self.mesh), self.mesh)
        if mesh == self.mesh:
            return self
        decisions = self.decisions.on_mesh(mesh, self.mesh.names_in(mesh))
        line = self.machine_prices.line
        return LaidOutProgram.of(self.captured, self.machine_prices.cluster, decisions, line=line)

    def _in_places(self, apart: Mapping[str, ParameterPlacement], states: States) -> LaidOutProgram:
        """Return the program of the same layouts with its parameters in the places `apart`."""
        program = replace(
            self,
            decisions=replace(self.decisions, apart=apart),
            machine_prices=self.machine_prices.with_buckets(states.buffer_bytes),
            states=states,
            source=self,
        )
        has_same_calls = program.has_copies == self.has_copies
        return program if has_same_calls else replace(program, forms={})

    def with_recomputation(self, decided: Mapping[str, Recompute]) -> LaidOutProgram:
        """Return the program of the same layouts with the regions recomputed that are `decided`."""
        if decided == self.decisions.recompute:
            return self
        decisions = replace(self.decisions, recompute=dict(decided))
        return replace(self, decisions=decisions, source=self)

    def stage_costs(
        self, like: StageCosts | None = None, beside: StageCosts | None = None
    ) -> StageCosts:
        """Return the costs of its stages, wherever it is cut.

        `like`: costs of equal layouts with other states; `beside`: with other regions recomputed.
        """
        kinds = self.machine_prices.all_kinds
        costs = [prices.along(self.flow.equal_blocks) for prices in kinds]
        return StageCosts(self.flow, self.mesh, costs, same_program=like, same_layouts=beside)

    @cached_property
    def stage_line(self) -> StageCosts:
        """Return the costs of its stages, wherever it is cut, by no other program's costs."""
        return self.stage_costs()

    @cached_property
    def run(self) -> RunCost:
        """Return the cost of one micro-batch, through all stages."""
        return program_run_cost(self.rewritten, self.machine_prices.slowest, self.equal_blocks)

    @cached_property
    def held(self) -> Memory:
        """Return what the program holds in no stages: the most of each kind."""
        size, known = self.states.buffer_bytes, self._saved_bytes
        memory = program_memory(self.rewritten, self.mesh, size, known=known)
        return memory.keeping(self.captured.kept_bytes)

    @cached_property
    def program_memory(self) -> StageMemory | None:
        """Return what a step in no stages takes. None: the program has no loss."""
        if (loss := self.loss) is None:
            return None
        known = self._saved_bytes
        return StageMemory.of(self.rewritten, self.mesh, [loss], self.travel, known=known)

    @cached_property
    def _saved_bytes(self) -> SavedBytesCache:
        """Return a cache of what calls save for backward; equal blocks are looked at once."""
        return SavedBytesCache(self.mesh, self.equal_blocks)

    @cached_property
    def stage_memories(self) -> StageMemories:
        """Return the function that tells what a stage takes."""
        return StageMemories(self.mesh, self.travel, self.forms)

    @cached_property
    def known_stages(self) -> dict[Hashable, StageMemory]:
        """Return a cache by cut points, readers of parameters, and whether backward is split."""
        return {}

    @property
    def travel(self) -> BucketConfig:
        """Return how gradients of parameters travel, from which kernels."""
        is_host = self.machine_prices.cluster.device.host.is_device
        return BucketConfig(self.states.buffer_bytes, HostKernels.here() if is_host else None)

    @property
    def loss(self) -> fx.Node | None:
        """Return what a step differentiates in the rewritten program. None: that is not known."""
        with suppress(InvalidInput):
            index = self.captured.loss_index
            return self.rewritten.output_node().args[0][index]  # type: ignore[index,return-value]
        return None
