"""Price: what a step of a pipeline takes, by simulation with the predicted costs of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from autopar.pipeline.memory.step_memory import (
    StageMemory,
    host_in_step,
    kept_in_step,
    most_in_step,
)
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.simulation.message_costs import passages, replica_links
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.timeline import Timeline
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.strategies.node_info import ParameterReaders


def price_step(pipelining: Pipelining, cluster: Cluster) -> Timeline:
    """The simulated step, latency and sums of gradients included."""
    made, stages = pipelining.schedule, pipelining.stages
    line = PipelineLine.of(pipelining.mesh, pipelining.axis)
    sums, shared = [stage.synced for stage in stages], dict[tuple[int, ...], float]()
    along = sums_along(pipelining)
    for one, link in zip(along, _links_of(along, cluster, line)):
        seconds = float(collective_seconds(one.moved.kind, link, one.moved.bytes))
        if len(one.stages) == 1:
            sums[one.stages[0]] += seconds
        else:
            shared[one.stages] = seconds
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
        passages=passages(made, stages, cluster, line),
        sync="eager",  # as the runtime begins them: `Schedule.gradient_positions`
        sync_cost=sums,
        after_sync=[stage.after for stage in stages],
        shared_sync=shared,
    )


@dataclass(frozen=True)
class SumAlong:
    """Of the gradients of what the same stages read, over all places that hold one of these."""

    stages: tuple[int, ...]
    places: tuple[int, ...]
    moved: Collective


def sums_along(pipelining: Pipelining) -> list[SumAlong]:
    """What the places of a pipeline move to sum gradients: the copies of a stage, one of each pipe,
    and the stages that read the same parameters, which sum theirs once."""
    made = pipelining.schedule
    sizes = dict[tuple[int, ...], int]()
    for index, stage in enumerate(pipelining.stages):
        sizes[index,] = stage.sums
    for shared in pipelining.shared:
        sizes[shared.stages] = shared.bytes
        for index in shared.stages:
            sizes[index,] -= shared.bytes
    found = []
    for stages, size in sizes.items():
        places = made.holders(stages)
        if size > 0 and len(places) > 1:
            moved = Collective("all_reduce", (pipelining.axis,), float(size), "step", SUMS)
            found.append(SumAlong(stages, places, moved))
    return found


def _links_of(along: Sequence[SumAlong], cluster: Cluster, line: PipelineLine) -> list[AxisLink]:
    """What the places of each sum have between them: copies of stages at the same time, stages that
    share parameters alone."""
    copies = tuple(one.places for one in along if len(one.stages) == 1)
    links = [*replica_links(cluster, line, copies)] if copies else []
    for one in along[len(copies) :]:
        links += replica_links(cluster, line, (one.places,))
    return links


def pipeline_cost(pipelining: Pipelining, run: RunCost, timeline: Timeline) -> Cost:
    """The parts of a simulated step; `run` is one micro-batch (or part) through all stages."""
    once, cast, stages = Cost.of(run), run.worked.cast, pipelining.stages
    busy, made = max(timeline.busy), pipelining.schedule
    # Where backward is split, nothing hides what the gradients of weights hide elsewhere.
    reduced = sum(stage.reduced for stage in stages) or 1.0
    split = run.moved.reduced * sum(stages[at].reduced for at in made.split_stages) / reduced
    parts, work = made.all_parts, once.compute - cast + once.shown + split
    share = (once.compute - cast) / work if work else 1.0
    moved = busy * (1 - share)
    hidden = max(0.0, once.hidden - split) * parts / made.ranks
    times = busy / work if work else 0.0  # how often the busiest rank runs as much as that
    gathered = sum(stage.gathering for stage in stages)
    every = sum(sync.end - sync.start for sync in timeline.synchronizations)
    sums = every - gathered if every - gathered > ROUNDED * every else 0.0
    updated, casts = _shown(timeline, stages)
    waits = timeline.makespan - busy
    exposed = moved + timeline.uncovered_sync - updated - casts
    return Cost(
        compute=busy * share + casts,
        communication=moved + hidden + sums + gathered,
        exposed=exposed if exposed > ROUNDED * timeline.step_time else 0.0,
        forward=((once.forward - cast) * parts + cast) / made.ranks,
        backward=once.backward * parts / made.ranks,
        gradient_sync=sums,
        gathered=gathered,
        updated=updated,
        hidden=hidden,
        bubble=waits if waits > ROUNDED * timeline.makespan else 0.0,
        again=once.again * times,
        between=(once.between + split * run.reduced_between) * times,
        copied=once.copied * times,
    )


def _shown(timeline: Timeline, stages: Sequence[StageCost]) -> tuple[float, float]:
    """By how much a step is longer for updates on the host, and for casts: their share of what the
    rank does that ends it, when it has summed all gradients."""
    if (last := timeline.last_update) is None:
        return 0.0, 0.0
    own = [stages[index] for index in timeline.schedule.stages_on(last.rank)]
    longer = (last.end - max(last.start, timeline.makespan)) / sum(stage.after for stage in own)
    return sum(stage.updated for stage in own) * longer, sum(stage.cast for stage in own) * longer


def held_at(pipelining: Pipelining, cut: StageCut, rank: int) -> list[fx.Node]:
    """The parameters and buffers that a rank along the pipeline's axis has, each once."""
    own = {*pipelining.schedule.stages_on(rank)}
    return [node for node, read in cut.stages.items() if not own.isdisjoint(read)]


def memory_by_place(
    pipelining: Pipelining,
    held: Sequence[Mapping[fx.Node, int]],
    taken: Mapping[int, StageMemory],
    buffer_bytes: int,
    readers: Mapping[fx.Node, ParameterReaders],
    kept_in_python: int = 0,
) -> list[Memory]:
    """The bytes on each rank along the pipeline's axis: each parameter and buffer that it has,
    `held` with how many of each, what its stages take in a step, and what forward keeps in Python.
    """
    made, mesh = pipelining.schedule, pipelining.mesh.without(pipelining.axis)
    found = []
    for rank, own in enumerate(held):
        kept = kept_in_step(made, rank, taken)
        used = live_copy_bytes(copy_groups_of_nodes(own, mesh, buffer_bytes, readers), mesh)
        memory = Memory.of(own, mesh, kept, used=used).keeping(kept_in_python)
        on_host = memory.host_activations + host_in_step(made, rank, taken)
        memory = replace(memory, host_activations=on_host)
        found.append(memory.at_once(most_in_step(made, rank, taken), used))
    return found
