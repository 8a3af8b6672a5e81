"""Plan: every decision about one model on one mesh, with the program that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.collectives import Price
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes import rewrite
from autopar.passes.microbatches import Microbatches
from autopar.passes.stages import split_stages
from autopar.pipeline.plan import Pipelining
from autopar.runtime.program import Program
from autopar.search.auto import Search
from autopar.search.decisions import Decisions
from autopar.search.flow import flow_of
from autopar.search.footprint import Memory, program_memory
from autopar.search.report import Cost, program_cost


@dataclass(frozen=True)
class MovementRecord:
    """One movement of a program."""

    forward: str
    backward: str | None  # None where no gradient flows
    axis: str  # several axes are joined by commas, outermost first
    tensor: str  # the type of what is moved, before
    bytes: int  # the larger of one rank's pieces before and after
    node: str


@dataclass(frozen=True)
class Plan:
    """What was decided. `program` is what runs; `movements()` lists what moves."""

    captured: Captured
    decisions: Decisions
    price: Price
    cluster: Cluster
    search: Search | None = None  # the account of the search, where there was one
    batches: Microbatches | None = None  # `captured` is then the program of one micro-batch
    pipelining: Pipelining | None = None  # `mesh` is then the mesh inside each stage

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
    def cost(self) -> Cost:
        """The predicted seconds of one step, and their parts."""
        once = program_cost(self.captured, self.decisions, self.program.graph, self.cluster)
        return once.times(self.microbatches)

    @cached_property
    def memory(self) -> Memory:
        """The predicted bytes on the fullest device, and their parts."""
        return program_memory(self.captured, self.program.graph, self.mesh)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter and buffer by its name, of every value by its node's."""
        graph = self.program.graph
        layouts = {n.name: n.meta["type"].layout for n in graph.nodes if "type" in n.meta}
        named = self.captured.parameters | self.captured.buffers
        return {name: layouts[placeholder] for placeholder, name in named.items()} | layouts

    def movements(self) -> list[MovementRecord]:
        """Everything that moves in forward or backward, in the order of the program."""
        records = []
        for node in self.program.graph.nodes:
            if "movement" not in node.meta:
                continue
            movement = node.meta["movement"]
            records.append(
                MovementRecord(
                    forward=movement.kind,
                    backward=movement.backward if node.meta["differentiable"] else None,
                    axis=",".join(movement.axes),
                    tensor=str(node.args[0].meta["type"]),
                    bytes=node.meta["bytes"],
                    node=node.name,
                )
            )
        return records

    def __str__(self) -> str:
        cost, memory = self.cost, self.memory
        lines = [
            f"plan on {self.mesh}, micro-batches: {self.microbatches}",
            f"  predicted step: {cost.seconds:.6g} s, compute {cost.compute:.6g} s, "
            f"communication {cost.communication:.6g} s, {cost.exposed:.6g} s of it exposed",
            f"  predicted memory: {memory.peak / 1e9:.6g} GB, activations "
            f"{memory.activations / 1e9:.6g} GB",
        ]
        for placeholder, name in self.captured.parameters.items():
            node = self.program.placeholders[placeholder]
            sync = node.meta.get("sync")
            summed = f"  gradient summed over {', '.join(sync)}" if sync else ""
            lines.append(f"  {name}: {node.meta['type']}{summed}")
        lines.append("movements")
        for record in self.movements():
            lines.append(
                f"  {record.node}: {record.forward} over {record.axis} of {record.tensor}, "
                f"{record.bytes} bytes, backward {record.backward or 'none'}"
            )
        for fallback in self.decisions.fallbacks:
            lines.append(f"  replicated: {fallback.operator} ({fallback.reason})")
        return "\n".join(lines)
