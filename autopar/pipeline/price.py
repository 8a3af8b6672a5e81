"""Price: what a step of a pipeline takes, by simulation with the predicted costs of its stages."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.collectives import movement_cost
from autopar.cost.price import ClusterPrice
from autopar.mesh import Mesh
from autopar.pipeline.keeping import course, taken
from autopar.pipeline.plan import Pipelining
from autopar.pipeline.simulator import simulate
from autopar.pipeline.timeline import Timeline
from autopar.search.build import OPTIMIZER_COPIES
from autopar.search.candidates import Kinds
from autopar.search.decisions import Decisions
from autopar.search.footprint import Memory
from autopar.search.report import Cost


def price_step(pipelining: Pipelining, graph: fx.Graph, inner: Mesh, cluster: Cluster) -> Timeline:
    """The simulated step, latency and sums of gradients included."""
    made, stages = pipelining.schedule, pipelining.stages
    link = cluster.link_between(0, min(inner.size, cluster.devices - 1))
    price = ClusterPrice(cluster, inner)
    summed = [node.meta["sync"] for node in graph.nodes if node.meta.get("sync")]
    axes = max(summed, key=len, default=())
    copies, sums = made.replicas, []
    for stage in stages:
        seconds = float(price.seconds("all_reduce", axes, stage.parameters)) if axes else 0.0
        if copies > 1:
            seconds += 2 * link.alpha
            seconds += 2 * (copies - 1) / copies * stage.parameters / link.bandwidth
        sums.append(seconds)
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


def node_cost(
    captured: Captured, decisions: Decisions, cluster: Cluster
) -> Callable[[fx.Node], tuple[float, float]]:
    """Seconds forward and backward of every node of the rewritten program."""
    mesh = decisions.mesh
    price = ClusterPrice(cluster, mesh)
    kinds = Kinds(captured, mesh, cluster.device, price)
    originals = {node.name: node for node in captured.graph.nodes}

    def cost(node: fx.Node) -> tuple[float, float]:
        movement = node.meta.get("movement")
        if movement is not None:
            before = node.args[0].meta["type"]  # type: ignore[union-attr]
            size = before.dtype.itemsize

            def seconds(both: bool) -> float:
                return movement_cost(movement, before.layout, before.shape, size, mesh, price, both)

            forward = seconds(False)
            whole = seconds(True) if node.meta["differentiable"] else forward
            return forward, whole - forward
        original = originals.get(node.name)
        if original is None or original.op != "call_function":
            return 0.0, 0.0
        return kinds.seconds(original, decisions.strategies.get(node.name))

    return cost
