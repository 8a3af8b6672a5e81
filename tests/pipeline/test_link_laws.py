"""Laws of links: a step takes no less over slower ones, and lasts as long as any of them is busy.

One program and its pipeline are priced on several machines, without another search.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import autopar as ap
from autopar.candidates.candidate import Candidate
from autopar.candidates.training_step import TrainingStep
from autopar.cluster import Cluster, Device, Level, Link, Node
from autopar.cluster.cluster_part import PipelineLine
from autopar.cost.operator_costs import ShardSizes, operator_work
from autopar.cost.rooflines import COLLECTIVES
from autopar.mesh import Mesh
from autopar.strategies.node_info import info
from tests.annotations import megatron
from tests.models import gpt
from tests.pipeline.models import share_captures  # noqa: F401

TINY = Device("tiny", {"f32": 1e9, "f64": 1e9}, 1e9, 4e9, overhead=0.0, efficiency=1.0)
LARGE = replace(TINY, name="large", flops={"f32": 3e9, "f64": 3e9}, bandwidth=9e9)
MESHES = {
    "apart": Mesh(pp=4, dp=2, tp=2),
    "inside": Mesh(dp=2, pp=4, tp=2),
    "last": Mesh(dp=2, tp=2, pp=4),
}
WAYS = ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "chimera"]


def machines(
    network: float = 1e8, inside: float = 1e9, rack: float = 5e7, devices: int = 4
) -> Cluster:
    """Sixteen devices in nodes, two of which are a rack."""
    nodes = (Node(TINY, devices, Link(1e-7, inside)),) * (16 // devices)
    levels = (Level("rack", 2, 3e-6, rack),) if len(nodes) > 2 else ()
    return Cluster(nodes, Link(1e-6, network), "racks", levels)


def mixed() -> Cluster:
    """Nodes of two kinds and of uneven counts."""
    link = Link(1e-7, 1e9)
    nodes = (Node(TINY, 3, link), Node(LARGE, 8, link), Node(TINY, 5, Link(2e-7, 5e8)))
    return Cluster(nodes, Link(1e-6, 1e8), "mixed")


@cache
def planned(name: str, way: str) -> ap.Plan:
    case = megatron(gpt(layers=8, batch=8))
    options = {"mesh": MESHES[name], "schedule": way, "microbatches": 4}
    return ap.plan(case.model, case.args, mode="propagate", cluster=machines(), **options)


def priced(plan: ap.Plan, cluster: Cluster) -> Candidate:
    """The same stages on other machines."""
    program = plan.step.program
    prices = replace(program.machine_prices, cluster=cluster)
    there = replace(program, machine_prices=prices, source=program)
    return Candidate(TrainingStep(there, plan.batches)).cut_as(plan.pipelining)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_over_slower_links_takes_no_less(name: str, way: str) -> None:
    plan = planned(name, way)
    for slower in (
        [{"network": 10.0**power} for power in (9, 7, 5)],
        [{"rack": 10.0**power} for power in (9, 7, 5)],
        [{"inside": 10.0**power} for power in (10, 8, 6)],
    ):
        steps = [priced(plan, machines(**links)).timeline for links in slower]
        seconds = [step.makespan for step in steps]
        assert all(one <= other * (1 + 1e-9) for one, other in pairwise(seconds)), slower
        seconds = [step.step_time for step in steps]
        if way != "zb-h1":
            # The stages that share a parameter split backward: which of their sums is first depends
            # on when these end, and the later one may be the longer.
            assert all(one <= other * (1 + 1e-9) for one, other in pairwise(seconds)), slower
        # Whatever the axes are, some of them runs between nodes, and between racks.
        assert seconds[-1] > 2 * seconds[0] or "inside" in slower[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_starts_when_its_ranks_have_made_its_gradients(way: str) -> None:
    """As the runtime starts them: with the last backward of its stages, one at a time on a rank."""
    timeline = priced(planned("apart", way), machines(1e6)).timeline
    schedule, free = timeline.schedule, Counter[int]()
    assert timeline.synchronizations
    for summed in sorted(timeline.synchronizations, key=lambda one: one.end):
        made = [
            timeline.ends[rank][positions[-1]]
            for rank in summed.ranks
            for stage, positions in schedule.gradient_positions[rank].items()
            if stage in summed.stages
        ]
        assert summed.start == max([*made, *(free[rank] for rank in summed.ranks)])
        free.update({rank: summed.end - free[rank] for rank in summed.ranks})


@pytest.mark.parametrize("name", MESHES)
def test_over_two_nodes_every_pipeline_depends_on_what_is_between(name: str) -> None:
    plan = planned(name, "1f1b")
    seconds = [priced(plan, machines(network, devices=8)).seconds for network in (2e8, 1e6, 1e4)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] > 10 * seconds[0]


def test_messages_between_nodes_are_slower_than_those_inside_and_only_those() -> None:
    """Four places in two nodes: the one between them is crossed once."""
    plan = planned("apart", "1f1b")
    hardware = priced(plan, machines(devices=8)).stage_hardware(
        plan.pipelining.schedule.placement, 0
    )
    assert [at.bandwidth for at in hardware] == [math.inf, 1e9, 1e8 / 4, 1e9]


@dataclass
class Busy:
    """What a step asks of the machines, in seconds at full rate, by resource."""

    candidate: Candidate

    @property
    def seconds(self) -> Counter[str]:
        found = Counter[str]()
        for place, nodes, times in self._runs():
            for rank in self._line.ranks[place].tolist():
                device = self.candidate.cluster.weakest([rank])
                for node in nodes:
                    for facts, strategy in info(node).calls if info(node).movement is None else ():
                        done = operator_work(
                            facts, ShardSizes(facts.rule, [strategy], self.candidate.mesh)
                        )
                        flops = float(done.flops[0] + done.backward_flops[0])
                        forward, backward = done.read + done.written, done.backward_read
                        moved = float((forward + backward + done.backward_written)[0])
                        found[f"compute {rank}"] += times * flops / device.peak(facts.dtype)
                        found[f"memory {rank}"] += times * moved / device.throughput
        for unit, size, bandwidth in (*self._collectives(), *self._sums(), *self._messages()):
            found[unit] += size / bandwidth
        return found

    @property
    def _line(self) -> PipelineLine:
        assert self.candidate.line is not None
        return self.candidate.line

    def _runs(self) -> Iterator[tuple[int, list, float]]:
        """Each place with the nodes of a stage there, and how often they run."""
        made = self.candidate.pipelining.schedule
        cut = self.candidate.cut(self.candidate.pipelining)
        for pipe, places in enumerate(made.placement):
            for stage, place in enumerate(places):
                nodes = cut.flow.made_in(*cut.bounds(stage))
                yield place, nodes, made.pipe_of.count(pipe)

    def _units(self) -> Iterator[tuple[str, np.ndarray, float]]:
        """Each unit with ways out: by rank whether it is there, and the bandwidth."""
        cluster = self.candidate.cluster
        node_of = np.repeat(np.arange(len(cluster.nodes)), cluster.used_of_nodes)
        for size, bandwidth in (
            (1, cluster.network.bandwidth),
            *((level.nodes, level.bandwidth) for level in cluster.levels),
        ):
            for unit in range(-(-len(cluster.nodes) // size)):
                yield f"{size} nodes {unit}", node_of // size == unit, bandwidth

    def _collectives(self) -> Iterator[tuple[str, float, float]]:
        for place, nodes, times in self._runs():
            for node in nodes:
                movement = info(node).movement
                if movement is not None:
                    kinds = [movement.kind, *([movement.backward] if info(node).learns else [])]
                    size = times * float(info(node).bytes)
                    yield from self._ring(place, movement.axes, kinds, size)

    def _sums(self) -> Iterator[tuple[str, float, float]]:
        """The gradients of a parameter are summed once a step, wherever it is read."""
        read = {
            (place, value): None
            for place, nodes, _ in self._runs()
            for node in nodes
            for value in node.all_input_nodes
            if info(value).sync
        }
        for place, parameter in read:
            size = float(info(parameter).type.local_bytes(self.candidate.mesh))
            yield from self._ring(place, info(parameter).sync, ["all_reduce"], size)

    def _ring(
        self, place: int, axes: tuple[str, ...], kinds: list[str], size: float
    ) -> Iterator[tuple[str, float, float]]:
        """It leaves each unit once with what a rank sends in all."""
        mesh, ranks = self.candidate.mesh, self._line.ranks[place]
        about = {"p": mesh.degree(axes), "V": size, "B": 1.0, "a": 0.0}
        rings = {"all_reduce", "all_gather", "reduce_scatter"}.intersection(kinds)
        sent = sum(float(COLLECTIVES[kind](**about)) for kind in kinds if kind in rings)
        for unit, is_there, bandwidth in self._units():
            for group in mesh.groups(axes):
                inside = is_there[ranks[list(group)]]
                if inside.any() and not inside.all():
                    yield unit, sent, bandwidth

    def _messages(self) -> Iterator[tuple[str, float, float]]:
        given = self.candidate.pipelining
        for pipe, places in enumerate(given.schedule.placement):
            times = given.schedule.pipe_of.count(pipe)
            for stage, ends in zip(given.stages[1:], pairwise(places)):
                for here, there in (ends, ends[::-1]):
                    for sender, receiver in zip(self._line.ranks[here], self._line.ranks[there]):
                        for unit, is_there, bandwidth in self._units():
                            if is_there[sender] and not is_there[receiver]:
                                yield unit, times * float(stage.receives), bandwidth


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("way", ["1f1b", "gpipe", "interleaved", "chimera"])
@pytest.mark.parametrize(
    "cluster", [machines(), machines(1e6), machines(rack=1e5), mixed()], ids=["", "n", "r", "mixed"]
)
def test_no_resource_is_busy_for_longer_than_a_step(name: str, way: str, cluster: Cluster) -> None:
    candidate = priced(planned(name, way), cluster)
    busy = Busy(candidate).seconds
    assert len(busy) > 32
    if name != "apart":  # where each stage is in a node, most are summed there
        assert list(Busy(candidate)._sums())
    resource, most = max(busy.items(), key=lambda one: one[1])
    assert most <= candidate.seconds * (1 + 1e-9), resource


def test_what_a_slow_network_carries_is_what_a_step_takes() -> None:
    """The law is no loose one: nearly all of the step is the way out of a node."""
    candidate = priced(planned("apart", "gpipe"), machines(1e4))
    busy = Busy(candidate).seconds
    assert max(busy.values()) > 0.4 * candidate.seconds
