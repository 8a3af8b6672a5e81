"""The comparison of the Chimera paper (Li and Hoefler 2021), by simulation.

    python -m benchmarks.chimera_paper [--nodes 64 2048] [--models bert-48 gpt-2]

Prices one training step of Bert-48 and GPT-2 on Piz Daint (a P100 in each node) for PipeDream,
PipeDream-2BW, GPipe, DAPPLE (1f1b), GEMS and Chimera. The first two never drain: theirs is the
steady state of 1f1b, what twice as many micro-batches take longer, beside which gradients are
summed after each micro-batch, or once a step. They train on another trajectory, so published
ranges, which are of synchronous schedules, are compared without them.

Each schedule takes its best number of stages p, copies d of the pipeline, micro-batch size b and
recomputation, as far as the memory of a node allows. One JSON line for each best case, and one for
each comparison: Chimera's speed-up over the others. Where a range of speed-ups is published it
stands beside, and the comparison is made again under other assumptions: which of them move the
figures towards the published ones explains the difference.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

from autopar.cluster import Cluster
from autopar.cost.rooflines import COLLECTIVES
from autopar.pipeline import Schedule, Timeline, schedule, simulate
from autopar.pipeline.simulation.synchronization import Sync, synchronize

NODES = (32, 64, 128, 256, 512, 1024, 2048)
SCHEDULES = ("gpipe", "1f1b", "gems", "chimera")
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
PUBLISHED = {("bert-48", 64): (1.19, 2.41), ("gpt-2", 2048): (1.38, 2.34)}
# The abstract's low end, over asynchronous schedules too; the high end is the same.
PUBLISHED_LOWEST = {("gpt-2", 2048): 1.16}
STATES = 16  # bytes of weight, gradient and two Adam moments of a parameter in f32
RESERVED = 1.5e9  # bytes of a node that the framework, its libraries and buffers take
MATRIX_PRODUCTS = 8  # of a layer's forward


@dataclass(frozen=True)
class Model:
    """A stack of equal layers between an embedding and a head that does not share its weight."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch_per_node: int  # samples of the global batch for each node: weak scaling

    @property
    def layer_parameters(self) -> int:
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def table_parameters(self) -> int:
        """Of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.table_parameters

    @property
    def layer_flops(self) -> float:
        """Of one sample's forward."""
        return self.sequence * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    @property
    def head_flops(self) -> float:
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    @property
    def layer_activations(self) -> float:
        """Bytes that one sample keeps in a layer: Korthikanti et al. 2022, doubled for f32."""
        return 2.0 * self.sequence * (34 * self.hidden + 5 * self.heads * self.sequence)

    @property
    def head_activations(self) -> float:
        """Logits and their logarithms."""
        return 8.0 * self.sequence * self.vocabulary

    @property
    def boundary(self) -> float:
        """Bytes of one sample between two stages."""
        return 4.0 * self.sequence * self.hidden


MODELS = {
    # 669,790,012 parameters; the published sequence length.
    "bert-48": Model("bert-48", 48, 1024, 16, 30522, 128, 16),
    # 1,389,327,360 parameters, as published: 64 layers.
    "gpt-2": Model("gpt-2", 64, 1280, 20, 50257, 632, 1),
    # As many parameters in 48 layers.
    "gpt-2-48": Model("gpt-2-48", 48, 1472, 23, 50257, 632, 1),
}


@dataclass(frozen=True)
class Assumptions:
    """What the paper leaves open; the defaults are what a good implementation reaches."""

    bandwidth: float = 1.0  # of the network, as a part of what the preset says
    activations: float = 1.0  # bytes kept, as a multiple of what fused operators keep
    even_layers: bool = False  # as many layers on each stage, whatever the head costs
    sync: Sync = "eager-where-it-helps"
    recompute: tuple[bool, ...] = (False, True)
    scales: tuple[str, ...] = ("direct", "doubling", "halving")


VARIANTS = {
    "network at a third": Assumptions(bandwidth=1 / 3),
    "network at a tenth (Gloo over TCP)": Assumptions(bandwidth=0.1),
    "activations times 1.25": Assumptions(activations=1.25),
    "activations times 1.5 (no fused operators)": Assumptions(activations=1.5),
    "even layers": Assumptions(even_layers=True),
    "even layers, network at a third": Assumptions(even_layers=True, bandwidth=1 / 3),
    "activations times 1.25, network at a third": Assumptions(activations=1.25, bandwidth=1 / 3),
    "synchronisation at the end": Assumptions(sync="lazy"),
    "no recomputation": Assumptions(recompute=(False,)),
    "direct concatenation only": Assumptions(scales=("direct",)),
}


@dataclass(frozen=True)
class Stages:
    """The stages of a cut: what a micro-batch costs on each."""

    forward: tuple[float, ...]
    activations: tuple[float, ...]  # bytes kept for backward without recomputation
    parameters: tuple[int, ...]
    message: float  # seconds
    boundary: float  # bytes


@dataclass(frozen=True)
class Case:
    """One way to run a step, priced."""

    model: str
    nodes: int
    schedule: str
    p: int
    d: int
    b: int
    microbatches: int
    recompute: bool
    scale: str | None
    step_seconds: float
    samples_per_second: float
    bubble_ratio: float
    uncovered_sync: float
    memory_gb: float


def layers_of_stages(model: Model, p: int, even: bool) -> list[int]:
    """Layers on each stage so that the slowest, with the head on the last, is fastest."""
    head = 0.0 if even else model.head_flops / model.layer_flops
    last = max(1, round((model.layers + head) / p - head))
    counts = [(model.layers - last) // (p - 1)] * (p - 1) + [last]
    for stage in range(model.layers - sum(counts)):
        counts[1 + stage % (p - 2) if p > 2 else 0] += 1
    return counts


@cache
def cut(model: Model, p: int, b: int, cluster: Cluster, given: Assumptions) -> Stages:
    device, link = cluster.device, cluster.network
    rate = device.peak("f32")

    def time(flops: float, products: int, traffic: float) -> float:
        work = (b * flops + products * device.half_flops) / rate
        return work + (b * traffic + products * device.half_bytes) / device.throughput

    layer = time(model.layer_flops, MATRIX_PRODUCTS, 2 * model.layer_activations)
    head = time(model.head_flops, 1, 2 * model.head_activations)
    counts = layers_of_stages(model, p, given.even_layers)
    forward = [count * layer for count in counts]
    activations = [given.activations * b * count * model.layer_activations for count in counts]
    parameters = [count * model.layer_parameters for count in counts]
    forward[-1] += head
    activations[-1] += given.activations * b * model.head_activations
    parameters[0] += model.table_parameters
    parameters[-1] += model.table_parameters
    boundary = b * model.boundary
    message = link.alpha + boundary / (link.bandwidth * given.bandwidth)
    return Stages(tuple(forward), tuple(activations), tuple(parameters), message, boundary)


@cache
def made(name: str, p: int, m: int, scale: str | None) -> Schedule:
    options = {"scale": scale} if scale else {}
    return schedule(name, stages=p, microbatches=m, **options)


@cache
def timed(
    name: str, p: int, m: int, scale: str | None, stages: Stages, recompute: bool, sync: Sync
) -> tuple[Timeline, float]:
    """The step with its sums listed, which take no time yet, and the bytes of the fullest rank."""
    plan = made(name, p, m, scale)
    factor = 3 if recompute else 2
    backward = [factor * forward for forward in stages.forward]
    kept = [stages.boundary] * p if recompute else list(stages.activations)
    timeline = simulate(
        plan, stages.forward, backward, latency=stages.message, activation=kept, sync=sync
    )
    memory = []
    for rank, activations in enumerate(timeline.peak_activations):
        held = [stage for _, stage in plan.local_stages(rank)]
        weights = STATES * sum(stages.parameters[stage] for stage in held)
        working = max(stages.activations[stage] for stage in held) if recompute else 0.0
        memory.append(RESERVED + weights + activations + working)
    return timeline, max(memory)


def cases(model: Model, name: str, cluster: Cluster, given: Assumptions) -> Iterator[Case]:
    """Every way to run `name` that fits the memory of a node."""
    nodes = cluster.devices
    scales: tuple[str | None, ...] = (None,)
    if name == "chimera":
        scales = given.scales
    for p in (2, 4, 8, 16, 32, 64):
        if p > model.layers or nodes % p:
            continue
        share = model.batch_per_node * p  # samples of one copy of the pipeline
        for b in (1, 2, 4, 8, 16, 32, 64):
            if b > share:
                continue
            m = share // b
            # Half a micro-batch takes half the time only when it fills the device.
            for scale in scales:
                size = b // 2 if scale == "halving" else b
                if not size or (scale in ("doubling", "halving") and m <= p // 2):
                    continue
                count = share // size if scale == "halving" else m
                for recompute in given.recompute:
                    if name in ASYNCHRONOUS:
                        if name == "pipedream" or m >= p:  # two versions are enough then
                            yield from _never_drained(
                                model, name, cluster, given, p, b, m, recompute
                            )
                        continue
                    form = "doubling" if scale == "halving" else scale
                    stages = cut(model, p, size, cluster, given)
                    timeline, memory = timed(name, p, count, form, stages, recompute, given.sync)
                    if memory > cluster.device.memory:
                        continue
                    replicas = timeline.schedule.pipes * nodes // p
                    costs = sum_seconds(stages, replicas, cluster, given)
                    synced = synchronize(timeline, costs, {}, (0.0,) * p)
                    yield Case(
                        model.name, nodes, name, p, nodes // p, b, m, recompute, scale,
                        synced.step_time, model.batch_per_node * nodes / synced.step_time,
                        timeline.bubble_ratio, synced.uncovered_sync, memory / 1e9,
                    )  # fmt: skip


def sum_seconds(
    stages: Stages, replicas: int, cluster: Cluster, given: Assumptions
) -> tuple[float, ...]:
    """The time of each stage's all-reduce."""
    link, all_reduce = cluster.network, COLLECTIVES["all_reduce"]
    bandwidth = link.bandwidth * given.bandwidth
    return tuple(
        float(all_reduce(p=replicas, V=4.0 * count, B=bandwidth, a=link.alpha))
        for count in stages.parameters
    )


def _never_drained(
    model: Model,
    name: str,
    cluster: Cluster,
    given: Assumptions,
    p: int,
    b: int,
    m: int,
    recompute: bool,
) -> Iterator[Case]:
    """The steady state of 1F1B with versions of weights: p - s of them on stage s, or two."""
    nodes, stages = cluster.devices, cut(model, p, b, cluster, given)
    count = max(m, p)  # as many are under way
    once, memory = timed("1f1b", p, count, None, stages, recompute, "eager")
    twice, _ = timed("1f1b", p, 2 * count, None, stages, recompute, "eager")
    steady = (twice.makespan - once.makespan) * m / count
    more = max(
        4.0 * ((p - s if name == "pipedream" else 2) - 1) * count
        for s, count in enumerate(stages.parameters)
    )
    memory += more  # at most: the fullest rank may be another
    if memory > cluster.device.memory:
        return
    sums = max(sum_seconds(stages, nodes // p, cluster, given))
    # A rank sums one gradient at a time, beside what it computes.
    step = max(steady, sums * (m if name == "pipedream" else 1))
    busy = max(once.busy) * m / count
    yield Case(
        model.name, nodes, name, p, nodes // p, b, m, recompute, None,
        step, model.batch_per_node * nodes / step, max(0.0, 1 - busy / steady),
        step - steady, memory / 1e9,
    )  # fmt: skip


def best(model: Model, cluster: Cluster, given: Assumptions) -> dict[str, Case]:
    """The fastest case of each schedule for which anything fits."""
    found = {}
    for name in (*ASYNCHRONOUS, *SCHEDULES):
        fitting = list(cases(model, name, cluster, given))
        if fitting:
            found[name] = min(fitting, key=lambda case: case.step_seconds)
    return found


def speedups(found: dict[str, Case]) -> dict[str, float]:
    """Chimera's over each of the others."""
    chimera = found["chimera"].step_seconds
    return {
        name: round(case.step_seconds / chimera, 3)
        for name, case in found.items()
        if name != "chimera"
    }


def comparison(model: Model, cluster: Cluster, found: dict[str, Case]) -> dict[str, object]:
    """The speed-ups, the published range and what other assumptions would give."""
    line: dict[str, object] = {
        "comparison": model.name,
        "nodes": cluster.devices,
        "speedups": speedups(found),
    }
    published = PUBLISHED.get((model.name, cluster.devices))
    if published is None:
        return line
    ranges = {
        name: _range(speedups(best(model, cluster, given))) for name, given in VARIANTS.items()
    }

    def nearest(end: int) -> str:
        """The assumption that alone brings this end of the range nearest to the published one."""
        own = {"nothing": _range(speedups(found))} | ranges
        return min(own, key=lambda name: abs(math.log(own[name][end] / published[end])))

    return line | {
        "range": _range(speedups(found)),
        "lowest": min(speedups(found).values()),  # over the asynchronous ones, too
        "published_lowest": PUBLISHED_LOWEST.get((model.name, cluster.devices)),
        "published": list(published),
        "range_when": ranges,
        "low_end_explained_by": nearest(0),
        "high_end_explained_by": nearest(1),
    }


def _range(found: dict[str, float]) -> list[float]:
    values = [value for name, value in found.items() if name in SCHEDULES]
    return [min(values), max(values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    for name in arguments.models:
        for nodes in arguments.nodes:
            cluster = Cluster.preset("piz-daint", nodes=nodes)
            found = best(MODELS[name], cluster, Assumptions())
            for case in found.values():
                print(json.dumps(asdict(case)), flush=True)
            print(json.dumps(comparison(MODELS[name], cluster, found)), flush=True)


if __name__ == "__main__":
    main()
