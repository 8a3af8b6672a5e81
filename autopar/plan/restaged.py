"""Restaged: another program on the parameters of a plan's pipeline, in the stages that hold these.

restaged(plan, program)                  a step: by the plan's schedule
restaged(plan, program, forward=True)    a call: every stage forward, nothing back
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.passes.flow import copy_subgraph, flow_of
from autopar.passes.microbatches import Microbatches, batch_statistics, cut_batch
from autopar.passes.restaging import cut_like
from autopar.passes.stages import split_stages
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule, forward_only, there_and_back
from autopar.pipeline.schedules import schedule
from autopar.plan.runtime_program import Program
from autopar.planner.candidate import Candidate
from autopar.strategies.node_info import info


def restaged(plan: Candidate, program: Program, forward: bool = False) -> Program:
    """`program` in the stages of the pipeline of `plan`, on whose mesh it is and whose parameters
    it reads; as many micro-batches go through them as it has."""
    pipelining = plan.pipelining
    assert pipelining is not None
    count = 1 if program.batches is None else program.batches.count
    made = scheduled(pipelining.schedule, count, forward)
    flow = flow_of(program.captured, program.graph, learns=not forward)
    stages = split_stages(cut_like(flow, plan.cut(pipelining)), program.mesh)
    return replace(program, pipelining=replace(pipelining, schedule=made), stages=stages)


def without_gradients(captured: Captured) -> Captured:
    """The same program where nothing is differentiated."""
    graph = copy_subgraph(captured.graph, captured.graph.nodes)
    copies = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        info(node).update(differentiable=False, learns=False)
    leaves = (copies[v.name] if isinstance(v, fx.Node) else v for v in captured.output_leaves)
    return replace(captured, graph=graph, output_leaves=tuple(leaves))


def forward_batches(captured: Captured, count: int) -> Microbatches | None:
    """The micro-batches in which a call goes through a pipeline, where their outputs make those of
    the batch."""
    if not batch_statistics(captured):
        with suppress(InvalidInput):
            return cut_batch(captured, count, tells=True)
    return None


def scheduled(made: Schedule, count: int, forward: bool) -> Schedule:
    """A schedule for another number of (parts of) micro-batches, with all stages where they are."""
    if forward:
        return forward_only(made.placement, count)
    if made.all_parts == count:
        return made
    if count % made.parts == 0:
        options: dict[str, Any] = dict(made.options)
        asked = {"stages": made.ranks, "microbatches": count // made.parts}
        with suppress(InvalidInput):  # it does not know so few
            found = schedule(made.name, **asked, **options)
            check(found)
            if found.placement == made.placement:
                return found
    return there_and_back(made.placement, count)
