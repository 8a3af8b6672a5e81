"""Another program on the parameters of a plan's pipeline, in the stages that hold these.

restage(plan, program)                  a step: by the plan's schedule
restage(plan, program, forward=True)    a call: every stage forward, nothing back
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.passes.flow import copy_subgraph, flow_of
from autopar.passes.microbatches import Microbatches, batch_statistics, cut_batch
from autopar.passes.restaging import cut_like
from autopar.passes.stages import split_stages
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule, forward_only, forward_then_backward
from autopar.pipeline.schedules import schedule as make_schedule
from autopar.plans.runtime_program import RuntimeProgram
from autopar.strategies.node_info import info


def restage(plan: Candidate, program: RuntimeProgram, *, forward: bool = False) -> RuntimeProgram:
    """Return `program` in the stages of the pipeline of `plan`, whose parameters it reads.

    As many micro-batches go through the stages as `program` has.
    """
    pipelining = plan.pipelining
    assert pipelining is not None
    count = 1 if program.batches is None else program.batches.count
    if pipelining.schedule.slices and not forward:  # outputs of sequences that are whole
        schedule = forward_then_backward(pipelining.schedule.placement, count)
    else:
        schedule = resize_schedule(pipelining.schedule, count, forward=forward)
    flow = flow_of(program.captured, program.graph, learns=not forward)
    stages = split_stages(cut_like(flow, plan.cut(pipelining)), program.mesh)
    return replace(program, pipelining=replace(pipelining, schedule=schedule), stages=stages)


def without_gradients(captured: Captured) -> Captured:
    """Return a copy of a program in which nothing is differentiated."""
    graph = copy_subgraph(captured.graph, captured.graph.nodes)
    copies = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        info(node).update(differentiable=False, learns=False)
    leaves = (copies[v.name] if isinstance(v, fx.Node) else v for v in captured.output_leaves)
    return replace(captured, graph=graph, output_leaves=tuple(leaves))


def forward_batches(captured: Captured, count: int) -> Microbatches | None:
    """Return the micro-batches in which a call goes through a pipeline.

    None if their outputs do not make those of the batch.
    """
    if not batch_statistics(captured):
        with suppress(InvalidInput):
            return cut_batch(captured, count, with_outputs=True)
    return None


def resize_schedule(schedule: Schedule, count: int, *, forward: bool) -> Schedule:
    """Return a schedule for another number of micro-batches, or of parts of them.

    All stages stay where they are. With `forward` it has no backward.
    """
    if forward:
        return forward_only(schedule.placement, count)
    if schedule.batch_parts == count:
        return schedule
    if count % schedule.parts == 0:
        options: dict[str, Any] = dict(schedule.options)
        sizes = {"stages": schedule.ranks, "microbatches": count // schedule.parts}
        with suppress(InvalidInput):  # it does not know so few
            resized = make_schedule(schedule.name, **sizes, **options)
            check(resized)
            if resized.placement == schedule.placement:
                return resized
    return forward_then_backward(schedule.placement, count)
