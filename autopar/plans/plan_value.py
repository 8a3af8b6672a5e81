"""PlanValue: every decision about one model on one mesh, with the program that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

from torch import fx

from autopar.candidates.alternative import Alternative
from autopar.candidates.beside import spread_beside
from autopar.candidates.candidate import Candidate, OfStep
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.search_step import SearchStep
from autopar.candidates.training_step import TrainingStep
from autopar.candidates.trial import Trial
from autopar.candidates.unfolded import unfolded
from autopar.capture.captured import Captured
from autopar.capture.dynamic import DynamicShapes
from autopar.capture.fingerprint import Fingerprint, fingerprint_of
from autopar.capture.listing import Listing
from autopar.capture.origins import moved_dtype
from autopar.defaults import Mode
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.passes.stages import split_stages
from autopar.plans.fallbacks import FallbackCost, fallback_costs
from autopar.plans.restaged import forward_batches, restage, without_gradients
from autopar.plans.runtime_program import RuntimeProgram
from autopar.plans.sliced import sliced_stages
from autopar.search.constraints import Constraints
from autopar.search.cost_graph_builder import CostGraphBuilder, MeshCostGraph
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results
from autopar.tensor_type import TensorType
from autopar.text.progress import Report

AnyPlan = TypeVar("AnyPlan", bound="PlanValue")
T = TypeVar("T")


@dataclass(frozen=True)
class MovementRecord:
    """One movement of a program."""

    forward: str
    backward: str | None  # None where no gradient flows
    axis: str  # several axes are joined by commas, outermost first
    tensor: str  # the type of what is moved, before
    bytes: int  # the larger of one rank's pieces before and after
    node: str
    module: str  # of its reader
    seconds: float  # predicted, forward and backward


class OfWholeStep(OfStep[T]):
    """Like `OfStep`, but of the step with all blocks of the program."""

    def __get__(self, candidate: Any, owner: type) -> Any:
        return self if candidate is None else self._read(candidate.whole_step)


@dataclass(frozen=True)
class PlanValue(Candidate):
    """The candidate that was taken, and the options it was planned by. `program` is what runs.

    Its figures are those of the program that was searched, in which a block may stand for many. All
    that has names is of the whole program, which is written out when it is asked for.
    """

    captured = OfWholeStep(lambda step: step.program.captured)
    decisions = OfWholeStep(lambda step: step.program.decisions)
    batches = OfWholeStep(lambda step: step.batches)
    pipelining = OfWholeStep(lambda step: step.pipelining)
    rewritten = OfWholeStep(lambda step: step.program.rewritten)
    flow = OfWholeStep(lambda step: step.program.flow)
    equal_blocks = OfWholeStep(lambda step: step.program.equal_blocks)
    loss = OfWholeStep(lambda step: step.program.loss)
    stage_costs = OfWholeStep(lambda step: step.program.stage_costs)
    stage_line = OfWholeStep(lambda step: step.stage_line)
    cut = OfWholeStep(lambda step: step.cut)

    mode: Mode = "propagate"  # how it was made
    limit: float | None = None  # bytes of each device that the search kept to
    constraints: Constraints | None = None  # the layouts that annotations fix
    alternatives: tuple[Alternative, ...] = ()  # ways to run a step that were weighed
    # How many questions were ruled out by bounds, unasked.
    left_out: Mapping[str, int] = field(default_factory=dict)
    asked: tuple[SearchStep, ...] = ()  # what the planner asked, with its answers, in order
    trials: tuple[Trial, ...] = ()  # what some of them took when they were run, the fastest first
    dynamic: DynamicShapes | None = None  # the sizes of inputs that it serves beside its own
    strict: bool = False  # whether operators without rules are refused, of later programs too
    # What is told of the searches of later programs.
    progress: Report | bool = field(default=False, compare=False, repr=False)

    @cached_property
    def whole_step(self) -> TrainingStep:
        """The step with all blocks of the program."""
        return unfolded(Candidate(self.step, self.search)).step

    @classmethod
    def of(cls: type[AnyPlan], candidate: Candidate, **options: Any) -> AnyPlan:
        """Return the plan of a candidate, with everything that is already computed of it."""
        return cls(candidate.step, candidate.search, **options)

    def with_trials(self, trials: tuple[Trial, ...]) -> Self:
        """Return this plan as one that was chosen by `trials`."""
        return replace(self, trials=trials)

    @cached_property
    def program(self) -> RuntimeProgram:
        """The rewritten program of all ranks."""
        program = RuntimeProgram(
            self.captured,
            self.decisions,
            self.rewritten,
            self.batches,
            buffer_bytes=self.states.buffer_bytes,
        )
        if self.pipelining is None:
            return program
        stages = split_stages(self.cut(self.pipelining), self.mesh)
        slices = sliced_stages(self)
        return replace(program, pipelining=self.pipelining, stages=stages, slices=slices)

    @cached_property
    def whole_program(self) -> RuntimeProgram:
        """The program of a whole batch, for calls that are no steps.

        It runs in one go, or forward through the stages of a pipeline.
        """
        if self.pipelining is not None:
            return self.forward_program(self.original, self.microbatches)
        return self.program if self.batches is None else self._companion(self.batches.whole)

    @cached_property
    def program_with_outputs(self) -> RuntimeProgram:
        """The program of a step that gives outputs beside the loss."""
        if self.batches is None:
            return self.program
        try:
            batches = cut_batch(self.batches.whole, self.batches.count, with_outputs=True)
        except InvalidInput as error:
            raise InvalidInput(
                "the outputs of a step in micro-batches are joined from those of each, or summed",
                got=error.got,
                remedy="microbatches=1, or outputs=False",
                source=error.source,
            ) from error
        program = self._with_outputs(batches.captured, batches)
        return program if self.pipelining is None else restage(self, program)

    def _with_outputs(self, captured: Captured, batches: Microbatches) -> RuntimeProgram:
        """Return the program of a step with more outputs, by the decisions of the step."""
        decisions = self.decisions
        if {node.name for node in captured.operators} != {n.name for n in self.captured.operators}:
            return self._companion(captured, batches)
        last = self.captured.graph.output_node().name
        ways = {key: way for key, way in decisions.ways.items() if key[1] != last}
        decisions = replace(decisions, ways=ways)
        program = LaidOutProgram.of(
            captured, self.cluster, decisions, states=self.states, line=self.line
        )
        return self._program_of(Candidate(TrainingStep(program, batches)))

    def _companion(self, captured: Captured, batches: Microbatches | None = None) -> RuntimeProgram:
        """Return another program on the parameters of this one; layouts spread from theirs."""
        return self._program_of(spread_beside(self, self.mode, captured, batches))

    def _program_of(self, candidate: Candidate) -> RuntimeProgram:
        return RuntimeProgram(
            candidate.captured,
            candidate.decisions,
            candidate.rewritten,
            candidate.batches,
            buffer_bytes=self.states.buffer_bytes,
        )

    def forward_program(self, captured: Captured, count: int) -> RuntimeProgram:
        """Return the program of a call in a pipeline, of this batch and mode or of others.

        It runs in `count` micro-batches where their outputs make those of the batch, else in one
        go.
        """
        batches = forward_batches(captured, count)
        program = captured if batches is None else batches.captured
        companion = self._companion(without_gradients(program), batches)
        return restage(self, companion, forward=True)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The type of every parameter and buffer by its name, of every value by its node's."""
        of_nodes = {
            node.name: info(node).type
            for node in self.rewritten.nodes
            if node.op != "output" and not has_results(node)
        }
        named = self.captured.parameters | self.captured.buffers
        marked = {
            node.name: TensorType.of(info(node).val, self.decisions.fixed[node.name])
            for node in self.captured.graph.nodes
            if node.name in self.decisions.fixed
        }
        stored = {name: of_nodes[placeholder] for placeholder, name in named.items()}
        return stored | of_nodes | marked

    @cached_property
    def cost_graph(self) -> MeshCostGraph:
        """The strategies that the search had to choose from, built again on first use."""
        return CostGraphBuilder(
            self.captured,
            self.mesh,
            self.cluster,
            replace(self.constraints or Constraints(), recompute=self.decisions.recompute),
            self.microbatches,
            self.states,
        ).run()

    @property
    def graph(self) -> Listing:
        """The program of all ranks: prints one line a node."""
        return Listing(self.rewritten)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter and buffer by its name, of every value by its node's."""
        return {name: type_.layout for name, type_ in self.types.items()}

    @property
    def annotated(self) -> Mapping[str, str]:
        """The user's line for each parameter that is annotated."""
        bound = self.constraints.parameters if self.constraints is not None else {}
        return {name: constraint.source for name, constraint in bound.items()}

    @property
    def original(self) -> Captured:
        """The captured program of a whole batch."""
        return self.captured if self.batches is None else self.batches.whole

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The features by which files and other ranks recognise the model."""
        return fingerprint_of(self.original)

    @cached_property
    def fallbacks(self) -> tuple[FallbackCost, ...]:
        """Operators that run replicated for want of a rule, and what that costs."""
        return fallback_costs(self.decisions.fallbacks, self.rewritten, self.prices)

    def movements(self) -> list[MovementRecord]:
        """Return each movement inside the program, in forward or backward, in its order.

        What a step moves of states is in `cost`: gradients that are summed at the end (or with
        each micro-batch, where they are cut), copies that live a step, and those that are gathered
        again for backward.
        """
        records = []
        for node in self.rewritten.nodes:
            if info(node).joint is not None:
                records.append(self._joint_record(node))
            if (movement := info(node).movement) is None:
                continue
            records.append(
                MovementRecord(
                    forward=movement.kind,
                    backward=movement.backward if info(node).learns else None,
                    axis=",".join(movement.axes),
                    tensor=str(replace(info(node.args[0]).type, dtype=moved_dtype(node))),
                    bytes=info(node).bytes,
                    node=node.name,
                    module=info(node).module,
                    seconds=self.prices.own(node).seconds,
                )
            )
        return records

    def _joint_record(self, node: fx.Node) -> MovementRecord:
        """Return the movement inside a kernel that ranks carry out together."""
        call = info(node).joint
        assert call is not None
        return MovementRecord(
            forward=call.joint.forward.__name__,
            backward=call.joint.backward.__name__ if info(node).learns else None,
            axis=",".join(call.axes),
            tensor=", ".join(map(str, info(node).types)),
            bytes=info(node).bytes,
            node=node.name,
            module=info(node).module,
            seconds=self.prices.inside(node).seconds,
        )
