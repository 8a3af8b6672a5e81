"""Price of a pipeline's step: simulated with the predicted costs of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from autopar.cluster import AxisLink, Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.cost.collective import Collective
from autopar.cost.copy_groups import copy_groups_of_nodes, live_copy_bytes
from autopar.cost.footprint import Memory
from autopar.cost.rooflines import collective_seconds
from autopar.cost.state_price import SUMS
from autopar.cost.time_report import ROUNDED, Cost, RunCost
from autopar.passes.stages import StageCut
from autopar.pipeline.continued_steps import continued, in_steady_state
from autopar.pipeline.memory.step_memory import (
    StageMemory,
    activation_peak_in_step,
    host_peak_in_step,
    peak_in_step,
)
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.simulation.message_costs import message_costs, replica_links
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.strategies.node_info import ParameterReaders, info


def price_step(pipelining: Pipelining, cluster: Cluster) -> Timeline:
    """Return the simulated step, latency and sums of gradients included."""
    schedule, stages = pipelining.schedule, pipelining.stages
    line = PipelineLine.of(pipelining.mesh, pipelining.axis)
    sums, shared = [stage.synced for stage in stages], dict[tuple[int, ...], float]()
    reductions = pipeline_reductions(pipelining)
    for reduction, link in zip(reductions, _links_of(reductions, cluster, line)):
        moved = reduction.moved
        seconds = float(collective_seconds(moved.kind, link, moved.bytes))
        if len(reduction.stages) == 1:
            sums[reduction.stages[0]] += seconds
        else:
            shared[reduction.stages] = seconds
    parts = schedule.parts  # of a micro-batch; the simulator takes the costs of all its parts
    # A split backward computes weight gradients after the reductions, and so hides none of them.
    backward = [
        parts * (stage.backward + stage.reduced * (index in schedule.split_stages))
        for index, stage in enumerate(stages)
    ]
    simulated = partial(
        simulate,
        forward=[parts * stage.forward for stage in stages],
        backward=backward,
        # Recomputation belongs to B or I, never to W.
        backward_weight=[parts * (stage.backward - stage.again) / 2 for stage in stages],
    )
    timeline = simulated(
        schedule,
        message_costs=message_costs(schedule, stages, cluster, line),
        sync_cost=sums,
        after_sync=[stage.after for stage in stages],
        shared_sync=shared,
        slice_times=pipelining.slice_times or None,
    )
    if not any(schedule.delays):
        return timeline
    count = in_steady_state(schedule).microbatches // schedule.microbatches
    shorter, longer = (
        simulated(steps, message_costs=message_costs(steps, stages, cluster, line)).makespan
        for steps in (continued(schedule, count), continued(schedule, count + 1))
    )
    return replace(timeline, drain=max(0.0, timeline.makespan - (longer - shorter)))


@dataclass(frozen=True)
class PipelineReduction:
    """Describe a gradient sum over all places that hold one of the stages that read alike."""

    stages: tuple[int, ...]
    places: tuple[int, ...]
    moved: Collective


def pipeline_reductions(pipelining: Pipelining) -> list[PipelineReduction]:
    """Return the gradient sums between the places of a pipeline.

    The copies of a stage, one of each pipe, sum their gradients; so do, once, the stages that read
    the same parameters.
    """
    sizes = dict[tuple[int, ...], int]()
    for index, stage in enumerate(pipelining.stages):
        sizes[index,] = stage.sums
    for shared in pipelining.shared:
        sizes[shared.stages] = shared.bytes
        for index in shared.stages:
            sizes[index,] -= shared.bytes
    reductions = []
    for stages, size in sizes.items():
        places = pipelining.schedule.holders(stages)
        if size > 0 and len(places) > 1:
            moved = Collective("all_reduce", (pipelining.axis,), float(size), "step", SUMS)
            reductions.append(PipelineReduction(stages, places, moved))
    return reductions


def _links_of(
    reductions: Sequence[PipelineReduction], cluster: Cluster, line: PipelineLine
) -> list[AxisLink]:
    """Return the link of each sum; copies of stages sum all at once, shared parameters alone."""
    copies = tuple(r.places for r in reductions if len(r.stages) == 1)
    links = [*replica_links(cluster, line, copies)] if copies else []
    for reduction in reductions[len(copies) :]:
        links += replica_links(cluster, line, (reduction.places,))
    return links


def pipeline_cost(pipelining: Pipelining, run: RunCost, timeline: Timeline) -> Cost:
    """Return the parts of a simulated step; `run` is one micro-batch (or part) on all stages."""
    once, cast, stages = Cost.of(run), run.worked.cast, pipelining.stages
    busy, schedule = max(timeline.busy), pipelining.schedule
    # Where backward is split, nothing hides what the gradients of weights hide elsewhere.
    reduced = sum(stage.reduced for stage in stages) or 1.0
    split = run.moved.reduced * sum(stages[at].reduced for at in schedule.split_stages) / reduced
    parts, work = schedule.batch_parts, once.compute - cast + once.shown + split
    share = (once.compute - cast) / work if work else 1.0
    moved = busy * (1 - share)
    hidden = max(0.0, once.hidden - split) * parts / schedule.ranks
    times = busy / work if work else 0.0  # how often the busiest rank runs as much as that
    gathered = sum(stage.gathering for stage in stages)
    every = sum(sync.end - sync.start for sync in timeline.synchronizations)
    sums = every - gathered if every - gathered > ROUNDED * every else 0.0
    updated, casts = _visible_updates(timeline, stages)
    waits = timeline.makespan - timeline.drain - busy
    exposed = moved + timeline.uncovered_sync - updated - casts
    return Cost(
        compute=busy * share + casts,
        communication=moved + hidden + sums + gathered,
        exposed=exposed if exposed > ROUNDED * timeline.step_time else 0.0,
        forward=((once.forward - cast) * parts + cast) / schedule.ranks,
        backward=once.backward * parts / schedule.ranks,
        gradient_sync=sums,
        gathered=gathered,
        updated=updated,
        hidden=hidden,
        bubble=waits if waits > ROUNDED * timeline.makespan else 0.0,
        again=once.again * times,
        between=(once.between + split * run.reduced_between) * times,
        copied=once.copied * times,
    )


def _visible_updates(timeline: Timeline, stages: Sequence[StageCost]) -> tuple[float, float]:
    """Return the seconds that updates on the host, and that casts, add to a step.

    Both are shares of the work behind the last gradient sum, on the rank that ends the step.
    """
    if (last := timeline.last_update) is None:
        return 0.0, 0.0
    on_rank = [stages[index] for index in timeline.schedule.stages_on(last.rank)]
    share = (last.end - max(last.start, timeline.makespan)) / sum(s.after for s in on_rank)
    return sum(s.updated for s in on_rank) * share, sum(s.cast for s in on_rank) * share


def held_nodes(pipelining: Pipelining, cut: StageCut, rank: int) -> list[fx.Node]:
    """Return the parameters and buffers that a rank along the pipeline's axis has, each once."""
    on_rank = {*pipelining.schedule.stages_on(rank)}
    return [node for node, read in cut.stages.items() if not on_rank.isdisjoint(read)]


def memory_by_place(
    pipelining: Pipelining,
    held: Sequence[Mapping[fx.Node, int]],
    taken: Mapping[int, StageMemory],
    buffer_bytes: int,
    readers: Mapping[fx.Node, ParameterReaders],
    kept_in_python: int = 0,
) -> list[Memory]:
    """Return the memory of each rank along the pipeline's axis.

    `held`: by rank, how many of each parameter and buffer it has. `taken`: the bytes of each stage
    in a step. `kept_in_python`: bytes that forward keeps outside of the graph.
    """
    schedule, mesh = pipelining.schedule, pipelining.mesh.without(pipelining.axis)
    memories, steady = [], in_steady_state(schedule)
    for rank, counts in enumerate(held):
        activations = activation_peak_in_step(steady, rank, taken)
        used = live_copy_bytes(copy_groups_of_nodes(counts, mesh, buffer_bytes, readers), mesh)
        memory = Memory.of(counts, mesh, activations, used=used).keeping(kept_in_python)
        delays = [schedule.delays[stage] for stage in schedule.stages_on(rank) if schedule.delays]
        for _ in range(max(delays, default=0)):  # versions beside the newest
            learned = {n: count for n, count in counts.items() if info(n).learns}
            memory = memory.with_stale(Memory.of(learned, mesh, 0.0))
        on_host = memory.host_activations + host_peak_in_step(steady, rank, taken)
        memory = replace(memory, host_activations=on_host)
        memories.append(memory.at_once(peak_in_step(steady, rank, taken), used))
    return memories
