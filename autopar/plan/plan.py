"""Plan: every decision about one model on one mesh, with the program that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.fingerprint import Fingerprint, fingerprint_of
from autopar.capture.listing import Listing
from autopar.cluster import Cluster
from autopar.collectives import Price
from autopar.cost.footprint import Memory, program_memory
from autopar.cost.program import Cost, NodePrices, program_cost
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.passes import rewrite
from autopar.passes.flow import flow_of
from autopar.passes.microbatches import Microbatches
from autopar.passes.stages import split_stages
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.price import pipeline_cost, pipeline_memory, price_step
from autopar.pipeline.timeline import Timeline
from autopar.plan.diff import PlanDiff, compare
from autopar.plan.explain import explain
from autopar.plan.explanation import Explanation
from autopar.plan.fallbacks import FallbackCost, fallback_costs
from autopar.plan.program import Program
from autopar.plan.text import plan_data, plan_text
from autopar.planner.choose import Alternative
from autopar.search.auto import Search
from autopar.search.build import Built, build
from autopar.search.constraints import Constraints, LayoutConstraint, read_constraints
from autopar.search.decisions import Decisions
from autopar.search.propagate import propagate
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results

if TYPE_CHECKING:
    from autopar.plan.file import SavedPlan


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


@dataclass(frozen=True)
class Plan:
    """What was decided. `program` is what runs; `movements()` lists what moves.

    print(plan)                                   what was decided, predicted time and memory
    plan.explain("layers.0.mlp.up")               why: each candidate, as formula and number
    plan.diff(other)                              two plans side by side
    plan.save("plan.json"); Plan.load("plan.json")
    """

    captured: Captured
    decisions: Decisions
    price: Price
    cluster: Cluster
    search: Search | None = None  # the account of the search, where there was one
    batches: Microbatches | None = None  # `captured` is then the program of one micro-batch
    pipelining: Pipelining | None = None  # `mesh` is then the mesh inside each stage
    mode: str = "propagate"  # how it was made
    limit: float | None = None  # bytes of each device that the search kept to
    constraints: Constraints | None = None  # what annotations asked
    alternatives: tuple[Alternative, ...] = ()  # ways to run a step that were weighed

    is_attached = True  # to its model; a plan from a file is not, at first

    @property
    def microbatches(self) -> int:
        """How many micro-batches a step runs, one after another."""
        return 1 if self.batches is None else self.batches.count

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh

    @cached_property
    def program(self) -> Program:
        """The rewritten program of all ranks."""
        graph = rewrite(self.captured, self.decisions, self.price)
        program = Program(self.captured, self.decisions, graph, self.batches)
        if self.pipelining is None:
            return program
        starts = [stage.starts for stage in self.pipelining.stages]
        stages = split_stages(flow_of(self.captured, graph), starts, self.mesh)
        return replace(program, pipelining=self.pipelining, stages=stages)

    @cached_property
    def whole_program(self) -> Program:
        """The program of a whole batch in one go, for direct calls beside steps in micro-batches.

        Parameters, buffers and inputs lie as the plan has them, and the rest follows from there.
        """
        if self.batches is None:
            return self.program
        whole, placed = self.batches.whole, self.decisions.placeholders
        marked = Constraints() if self.mode == "data" else read_constraints(whole, self.mesh, {})
        others = [*whole.buffers, *(name for name in whole.inputs if name is not None)]
        constraints = replace(
            marked,
            parameters={
                n: LayoutConstraint(placed[key], "the plan") for key, n in whole.parameters.items()
            },
            inputs={key: LayoutConstraint(placed[key], "the plan") for key in others},
        )
        decisions = propagate(whole, self.mesh, constraints)
        return Program(whole, decisions, rewrite(whole, decisions, self.price))

    @cached_property
    def cost(self) -> Cost:
        """The predicted seconds of one step, and their parts."""
        once = program_cost(self.program.graph, self.mesh, self.cluster)
        if self.pipelining is not None and self.timeline is not None:
            return pipeline_cost(self.pipelining, once, self.timeline)
        return once.times(self.microbatches)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The simulated step of a pipeline."""
        if self.pipelining is None:
            return None
        return price_step(self.pipelining, self.cluster)

    @cached_property
    def memory(self) -> Memory:
        """The predicted bytes on the fullest device, and their parts."""
        if self.pipelining is not None:
            flow = flow_of(self.captured, self.program.graph)
            return pipeline_memory(self.pipelining, flow)
        return program_memory(self.program.graph, self.mesh)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The type of every parameter and buffer by its name, of every value by its node's."""
        found = {
            node.name: info(node).type
            for node in self.program.graph.nodes
            if node.op != "output" and not has_results(node)
        }
        named = self.captured.parameters | self.captured.buffers
        marked = {
            node.name: TensorType(
                tuple(info(node).val.shape),
                info(node).val.dtype,
                self.decisions.fixed[node.name],
            )
            for node in self.captured.graph.nodes
            if node.name in self.decisions.fixed
        }
        return {name: found[placeholder] for placeholder, name in named.items()} | found | marked

    @cached_property
    def cost_graph(self) -> Built:
        """All that the search had to choose from; built again when it is first asked for."""
        constraints = self.constraints or Constraints()
        return build(self.captured, self.mesh, self.cluster, constraints, self.microbatches)

    @property
    def graph(self) -> Listing:
        """The program of all ranks: prints one line a node."""
        return Listing(self.program.graph)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter and buffer by its name, of every value by its node's."""
        return {name: type_.layout for name, type_ in self.types.items()}

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks, the axis of a pipeline among its axes."""
        return self.mesh if self.pipelining is None else self.pipelining.mesh

    @property
    def original(self) -> Captured:
        """The captured program of a whole batch."""
        return self.captured if self.batches is None else self.batches.whole

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the model is, for files and other ranks."""
        return fingerprint_of(self.original)

    @cached_property
    def fallbacks(self) -> tuple[FallbackCost, ...]:
        """Operators that run replicated for want of a rule, and what that costs."""
        return fallback_costs(self.decisions.fallbacks, self.program.graph, self._prices)

    @cached_property
    def _prices(self) -> NodePrices:
        return NodePrices(self.cluster, self.mesh)

    def explain(self, name: str) -> Explanation:
        """Why a parameter, a module's operator or a node is laid out as it is."""
        return explain(self, name)

    def diff(self, other: Plan | SavedPlan) -> PlanDiff:
        """Two plans side by side."""
        return compare(self, other)

    def to_json(self) -> dict[str, Any]:
        """What `print` shows, as plain data. (`save` writes what can be loaded again.)"""
        return plan_data(self)

    def save(self, path: str | Path) -> None:
        """Write every decision to a file; equal plans give equal files."""
        from autopar.plan.file import SavedPlan

        SavedPlan.of(self).save(path)

    @staticmethod
    def load(path: str | Path) -> SavedPlan:
        """Read a plan from a file. It runs once it is attached to its model."""
        from autopar.plan.file import SavedPlan

        return SavedPlan.load(path)

    def attach(
        self, model: nn.Module, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Plan:
        """This plan for another copy of the model; any other model is refused.

        Without `args` and `kwargs`, `model` is called as the one that was planned."""
        from autopar.plan.file import SavedPlan

        example = self.original.example
        if not args and not kwargs:
            args, kwargs = example.args, example.kwargs
        captured = capture(model, args, kwargs)
        saved, found = SavedPlan.of(self), fingerprint_of(captured)
        saved.require_same(found)
        is_same = found == self.fingerprint and found.is_complete
        if is_same and captured.example.device == example.device:
            return self
        return saved.attach_captured(captured)

    def movements(self) -> list[MovementRecord]:
        """Everything that moves in forward or backward, in the order of the program."""
        records = []
        for node in self.program.graph.nodes:
            if (movement := info(node).movement) is None:
                continue
            records.append(
                MovementRecord(
                    forward=movement.kind,
                    backward=movement.backward if info(node).differentiable else None,
                    axis=",".join(movement.axes),
                    tensor=str(info(node.args[0]).type),
                    bytes=info(node).bytes,
                    node=node.name,
                    module=info(node).module,
                    seconds=self._prices(node).seconds,
                )
            )
        return records

    def __str__(self) -> str:
        return plan_text(self)
