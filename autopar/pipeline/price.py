"""Price: what a step of a pipeline takes, by simulation with the predicted costs of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.cluster import AxisLink, Cluster
from autopar.cost.footprint import Memory
from autopar.cost.model import COLLECTIVES
from autopar.cost.program import Cost
from autopar.cost.ways import groups_in, used_bytes
from autopar.mesh import Mesh
from autopar.passes.stages import Cut
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.simulator import simulate
from autopar.pipeline.step_memory import StageMemory, host_in_step, kept_in_step, most_in_step
from autopar.pipeline.timeline import Timeline


def price_step(pipelining: Pipelining, cluster: Cluster) -> Timeline:
    """The simulated step, latency and sums of gradients included."""
    made, stages = pipelining.schedule, pipelining.stages
    link = stage_link(cluster, pipelining.mesh, pipelining.axis)
    sums = [stage.summed for stage in stages]
    if made.pipes > 1:
        between = COLLECTIVES["all_reduce"]
        for index, stage in enumerate(stages):
            size, bandwidth = stage.gradients, link.bandwidth
            sums[index] += float(between(p=made.pipes, V=size, B=bandwidth, a=link.alpha))
    largest = max(stage.receives for stage in stages)
    parts = made.parts  # of micro-batches, whose costs the simulator takes
    # Backward that is split comes to gradients of weights when reductions are done.
    backward = [
        parts * (stage.backward + stage.reduced * (index in made.split_stages))
        for index, stage in enumerate(stages)
    ]
    return simulate(
        made,
        forward=[parts * stage.forward for stage in stages],
        backward=backward,
        # What runs again does so in B or I: never in W.
        backward_weight=[parts * (stage.backward - stage.again) / 2 for stage in stages],
        latency=link.alpha + largest / link.bandwidth,
        sync="eager-where-it-helps",
        sync_cost=sums,
    )


def pipeline_cost(pipelining: Pipelining, once: Cost, timeline: Timeline) -> Cost:
    """The parts of a simulated step; `once` is one micro-batch (or part) through all stages."""
    busy, parts = max(timeline.busy), pipelining.schedule.all_parts
    work = once.compute + once.shown
    share = once.compute / work if work else 1.0
    moved, hidden = busy * (1 - share), once.hidden * parts / pipelining.schedule.ranks
    times = busy / work if work else 0.0  # how often the busiest rank runs as much as that
    sums = sum(sync.end - sync.start for sync in timeline.synchronizations)
    return Cost(
        compute=busy * share,
        communication=moved + hidden + sums,
        exposed=moved + timeline.uncovered_sync,
        forward=once.forward * parts / pipelining.schedule.ranks,
        backward=once.backward * parts / pipelining.schedule.ranks,
        gradient_sync=sums,
        hidden=hidden,
        bubble=timeline.makespan - busy,
        again=once.again * times,
        between=once.between * times,
        copied=once.copied * times,
    )


def held_at(pipelining: Pipelining, cut: Cut, rank: int) -> list[fx.Node]:
    """The parameters and buffers that a rank along the pipeline's axis has, each once."""
    own = {stage for _, stage in pipelining.schedule.local_stages(rank)}
    return [node for node, read in cut.stages.items() if not own.isdisjoint(read)]


def memory_by_place(
    pipelining: Pipelining, cut: Cut, taken: Mapping[int, StageMemory], buffer_bytes: int
) -> list[Memory]:
    """The bytes on each rank along the pipeline's axis: each parameter and buffer once that some
    of its stages read, and what these take in a step."""
    made, mesh = pipelining.schedule, pipelining.mesh.without(pipelining.axis)
    found = []
    for rank in range(made.ranks):
        held = held_at(pipelining, cut, rank)
        kept = kept_in_step(made, rank, taken)
        used = used_bytes(groups_in(held, mesh, buffer_bytes, cut.readers), mesh)
        memory = Memory.of(held, mesh, kept, used=used)
        on_host = memory.host_activations + host_in_step(made, rank, taken)
        memory = replace(memory, host_activations=on_host)
        found.append(memory.at_once(most_in_step(made, rank, taken), used))
    return found


def stage_link(cluster: Cluster, mesh: Mesh, axis: str) -> AxisLink:
    """What messages from stage to stage take, all ranks of a stage sending at once."""
    return cluster.group_link(mesh, (axis,))
