"""Price: what a step of a pipeline takes, by simulation with the predicted costs of its stages."""

from __future__ import annotations

from torch import fx

from autopar.capture.captured import Captured
from autopar.cluster import AxisLink, Cluster
from autopar.cost.model import COLLECTIVES
from autopar.mesh import Mesh
from autopar.pipeline.keeping import course, taken
from autopar.pipeline.plan import Pipelining
from autopar.pipeline.simulator import simulate
from autopar.pipeline.timeline import Timeline
from autopar.search.build import OPTIMIZER_COPIES
from autopar.search.flow import flow_of
from autopar.search.footprint import Memory
from autopar.search.report import Cost, NodePrices
from autopar.search.stages import Line


def price_step(pipelining: Pipelining, cluster: Cluster) -> Timeline:
    """The simulated step, latency and sums of gradients included."""
    made, stages = pipelining.schedule, pipelining.stages
    link = stage_link(cluster, pipelining.mesh, pipelining.axis)
    sums = [stage.summed for stage in stages]
    if made.replicas > 1:
        between = COLLECTIVES["all_reduce"]
        for index, stage in enumerate(stages):
            size, bandwidth = stage.parameters, link.bandwidth
            sums[index] += float(between(p=made.replicas, V=size, B=bandwidth, a=link.alpha))
    largest = max(stage.receives for stage in stages)
    again = pipelining.recompute  # the forward, in B or I: never in W
    parts = made.parts  # the costs are those of slices, the simulator takes those of micro-batches
    return simulate(
        made,
        forward=[parts * stage.forward for stage in stages],
        backward=[parts * stage.backward for stage in stages],
        backward_weight=[
            parts * max(stage.backward - again * stage.forward, 0) / 2 for stage in stages
        ],
        latency=link.alpha + largest / link.bandwidth,
        sync="eager-where-it-helps",
        sync_cost=sums,
    )


def pipeline_cost(pipelining: Pipelining, once: Cost, timeline: Timeline) -> Cost:
    """The parts of a simulated step; `once` is one slice of the batch through all stages."""
    busy, parts = max(timeline.busy), pipelining.schedule.slices
    again = once.forward * pipelining.recompute
    work = once.compute + once.communication - once.gradient_sync
    share = once.compute / work if work else 1.0
    moved = busy * (1 - share)
    sums = sum(sync.end - sync.start for sync in timeline.synchronizations)
    return Cost(
        compute=busy * share,
        communication=moved + sums,
        exposed=moved + timeline.uncovered_sync,
        forward=once.forward * parts / pipelining.schedule.ranks,
        backward=(once.backward + again) * parts / pipelining.schedule.ranks,
        gradient_sync=sums,
        bubble=timeline.makespan - busy,
    )


def pipeline_memory(pipelining: Pipelining) -> Memory:
    """The bytes of the fullest rank: the states of all stages it holds, and what is in flight."""
    most = Memory(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    made, stages = pipelining.schedule, pipelining.stages
    for rank in range(made.ranks):
        held = {stage for _, stage in made.held_by(rank)}
        parameters = float(sum(stages[stage].parameters for stage in held))
        states = (2 + OPTIMIZER_COPIES) * parameters
        moments = course(made, rank, pipelining.recompute)
        kept = max((taken(stages, moment) for moment in moments), default=states) - states
        memory = Memory(parameters, parameters, OPTIMIZER_COPIES * parameters, 0.0, kept, 0.0)
        most = max(most, memory, key=lambda memory: memory.peak)
    return most


def line_of(
    captured: Captured, graph: fx.Graph, inner: Mesh, cluster: Cluster, mesh: Mesh, axis: str
) -> Line:
    """The rewritten program of `captured`, to be cut into stages along `axis` of `mesh`."""
    link = stage_link(cluster, mesh, axis)
    return Line(flow_of(captured, graph), inner, NodePrices(cluster, inner), link.bandwidth)


def stage_link(cluster: Cluster, mesh: Mesh, axis: str) -> AxisLink:
    """What messages from stage to stage take, all ranks of a stage sending at once."""
    return cluster.group_link(mesh, (axis,))
