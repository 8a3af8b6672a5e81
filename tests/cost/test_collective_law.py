"""Law: an all-reduce is a reduce-scatter and an all-gather, and costs what these cost together."""

import itertools

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.cluster import AxisLink, Link
from autopar.cost.rooflines import collective_seconds

RANKS = (2, 3, 4, 7, 8, 12, 64, 127, 1000, 1024, 16_384)
SIZES = (1.0, 4e3, 25e6, 1e9, 1e13)
LINKS = (
    Link(0.0, 1e9),
    Link(3e-6, 370e9),
    Link(1e-3, 1e6),
    Link(3e-6, 370e9, {("all_reduce", 8): (9e-6, 8e10)}),  # what was not measured is as these are
    Link(3e-6, 370e9, {("all_gather", 2): (1e-5, 5e9), ("shift", 4): (1e-9, 1e12)}),
)


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_an_all_reduce_costs_what_its_halves_cost(link: Link) -> None:
    for ranks, size in itertools.product(RANKS, SIZES):
        axis = AxisLink("dp", ranks, "between", link, link.bandwidth)
        whole, scattered, gathered = (
            float(collective_seconds(kind, axis, size))
            for kind in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert whole <= (scattered + gathered) * (1 + 1e-12) <= 1.1 * whole
        assert scattered == gathered


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100"])
@pytest.mark.parametrize("nodes", [1, 3, 128])
def test_cut_states_move_as_long_as_whole_ones(cluster: str, nodes: int) -> None:
    """ZeRO-1 scatters a sum and gathers what is updated: in all the sum of data parallelism."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)), Loss())
        x = torch.empty(8 * nodes, 1024)
    machines = ap.Cluster.preset(cluster, nodes)
    whole, zero1 = (
        ap.plan(model, (x,), cluster=machines, mesh=ap.Mesh(dp=8 * nodes), mode="data", states=how)
        for how in ("whole", "zero1")
    )
    assert whole.cost.gradient_sync > 0
    assert zero1.cost.gradient_sync == pytest.approx(whole.cost.gradient_sync / 2, rel=1e-9)
    assert zero1.cost.gathered == pytest.approx(whole.cost.gradient_sync / 2, rel=1e-9)
