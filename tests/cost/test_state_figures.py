"""The figures of a setting of states are those of a plan; none that is left out is better."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.cluster import Level, Link
from autopar.cluster.nested_groups import nested_group_sizes
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.state_figures import ParameterSizes, state_memory, state_traffic
from autopar.cost.state_price import GATHERS, SUMS
from autopar.states import NAMED, States, buffer_sizes, nested_settings, split_mesh
from tests import models
from tests.pipeline.models import share_captures  # noqa: F401
from tests.toy import machines

PARTIAL = [States(2, 2, "all"), States(2, 1, 4), States("all", 1, "all"), States(4, 2, 2)]
SETTINGS = [*NAMED.values(), *PARTIAL]


def two_nodes(devices: int = 2, latency: float = 1e-6, bandwidth: float = 1e8) -> ap.Cluster:
    """Nodes whose links inside take 1e9 bytes/s, and those between them `bandwidth`."""
    node = machines(devices, 1e9, latency).nodes[0]
    return ap.Cluster((node, node), Link(latency, bandwidth), "two nodes")


def moved_by(plan: ap.Plan) -> float:
    """Return the seconds of the gathers and gradient sums of a plan's program in a step."""
    return sum(
        float(plan.prices.price.bucketed(move.axes, move.bytes, move.kind))
        * (1 if move.when == "step" else plan.microbatches)
        for node in plan.rewritten.nodes
        for move in plan.prices.collectives(node)
        if move.what in (GATHERS, SUMS)
    )


class Linears(nn.Sequential):
    """Layers of one size, and the mean of the squares of what they give."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("precision", [None, ap.Precision(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["linears", "gpt"])
def test_figures_are_those_of_plans(name: str, precision: ap.Precision | None) -> None:
    cluster, mesh = two_nodes(), ap.Mesh(dp=4)
    case = models.Case("linears", Linears(), (torch.randn(8, 64),))
    case = case if name == "linears" else models.shared("gpt", layers=2)
    options = {"mesh": mesh, "mode": "data", "cluster": cluster, "precision": precision}
    expected, found = {}, {}
    for setting, size in product(SETTINGS, (25 << 20, 1 << 13)):
        states = replace(setting, buffer_bytes=size)
        plan = ap.plan(case.model, case.args, microbatches=2, states=states, **options)
        sizes = ParameterSizes.of(plan.captured)
        split, axes = split_mesh(states, ("dp",), mesh)
        assert split == plan.mesh
        figure = state_traffic(sizes, states, ClusterPrice(cluster, split, size), axes)
        expected[states], found[states] = moved_by(plan), figure.seconds(2)
        assert found[states] == pytest.approx(expected[states], rel=1e-6), states
        held = state_memory(sizes, states, 4)
        memory = plan.memory
        kinds = memory.parameters, memory.gradients, memory.optimizer
        assert (held.parameters, held.gradients, held.optimizer) == pytest.approx(kinds), states
        assert held.copies <= memory.gathered * (1 + 1e-9)
        shown = figure.least_shown(
            2,
            forward=plan.cost.forward / 2,
            backward=plan.cost.backward / 2,
            overlap=cluster.device.overlap,
        )
        assert shown <= plan.cost.exposed * (1 + 1e-9), states
    assert sorted(found, key=found.__getitem__) == sorted(expected, key=expected.__getitem__)


def test_sizes_on_each_rank() -> None:
    case = models.Case("linears", Linears(), (torch.randn(8, 64),))
    sizes = ParameterSizes.of(capture(case.model, case.args, {}))
    ((kind, counts),) = sizes.kinds.items()
    assert counts == {64 * 64: 4}
    ((other, cut),) = sizes.on_each_rank(tensor=2, stages=4).kinds.items()
    assert (other, dict(cut)) == (kind, {64 * 32: 1})
    whole = state_memory(sizes, States(), 8).total
    assert whole == 4 * 4 * 4 * 64 * 64
    assert state_memory(sizes, States.of("zero3"), 8).total == whole / 8


@pytest.mark.parametrize("precision", [None, ap.Precision(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e10])
def test_no_setting_that_is_left_out_is_better(
    precision: ap.Precision | None, bandwidth: float
) -> None:
    """In bytes over links without latency: one that is listed moves no more and holds no more."""
    cluster, mesh = two_nodes(4, 0.0, bandwidth), ap.Mesh(dp=8)
    case = models.Case("linears", Linears(), (torch.randn(8, 64),))
    plan = ap.plan(case.model, case.args, mesh=mesh, mode="data", precision=precision)
    sizes = ParameterSizes.of(plan.captured)

    def figures(states: States, microbatches: int) -> tuple[float, float]:
        split, axes = split_mesh(states, ("dp",), mesh)
        price = ClusterPrice(cluster, split, states.buffer_bytes)
        seconds = state_traffic(sizes, states, price, axes).seconds(microbatches)
        return seconds, state_memory(sizes, states, 8).total

    factors = (1, 4, "all")
    every = [
        States(cut, summed, updated)
        for cut, summed, updated in product(factors, factors, factors)
        if factors.index(summed) <= factors.index(updated)
    ]
    levels = nested_group_sizes(cluster, mesh, ("dp",))
    assert levels == (4, 8)
    for microbatches in (1, 2, 8):
        listed = nested_settings(8, levels, microbatches=microbatches)
        assert len(listed) < len(every)
        known = [figures(states, microbatches) for states in listed]
        for states in every:
            seconds, size = figures(states, microbatches)
            assert any(s <= seconds * (1 + 1e-9) and b <= size for s, b in known), states


def test_settings_come_from_simple_to_complex() -> None:
    listed = nested_settings(128, (8, 32, 128), microbatches=4)
    assert [str(states) for states in listed[:4]] == [*NAMED]
    assert len(set(listed)) == len(listed)
    numbers = [len(states.numbers) for states in listed]
    assert numbers == sorted(numbers)
    assert nested_settings(1, (1,)) == [States()]
    assert nested_settings(4, (3, 4)) == nested_settings(4)
    assert States(8, "all", "all") in nested_settings(128, (8,))
    assert States(8, 1, "all") not in nested_settings(128, (8,))


def test_neighbours_share_nodes_and_racks() -> None:
    cluster = ap.Cluster.preset("dgx-a100", nodes=16)
    racks = replace(cluster, levels=(Level("rack", 4, 1e-6, 1e11),))
    for mesh, sizes in (
        (ap.Mesh(dp=128), (8, 32, 128)),
        (ap.Mesh(dp=16, tp=8), (4, 16)),
        (ap.Mesh(pp=2, dp=32, tp=2), (4, 16, 32)),
        (ap.Mesh(dp=32, pp=2, tp=2), (2, 8, 32)),
        (ap.Mesh(dp=1, tp=128), (1,)),
    ):
        assert nested_group_sizes(racks, mesh, ("dp",)) == sizes, mesh
    assert nested_group_sizes(cluster, ap.Mesh(dp=128), ("dp",)) == (8, 128)
    (node, *_) = cluster.nodes
    mixed = ap.Cluster((node, replace(node, devices=4)), cluster.network, "mixed")
    assert nested_group_sizes(mixed, ap.Mesh(dp=12), ("dp",)) == (4, 12)


def test_buffers_are_small_beside_the_parameters() -> None:
    assert buffer_sizes(1e6) == [25 << 20]
    assert buffer_sizes(13e9) == [25 << 20, 128 << 20, 512 << 20]
