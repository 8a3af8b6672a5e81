"""The table of all moves says what the shortest redistribution of each pair takes."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.collectives import redistribution_cost
from autopar.cost.cluster_price import ClusterPrice
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.search.reshard_table import ReshardTerms, reshard_table
from autopar.states import BUFFER_BYTES
from tests.toy import machines

SHAPES = [(8, 16), (8, 9, 10), (1, 8, 3), (3,), (16, 8)]


@pytest.mark.parametrize("mesh", [Mesh(a=2, b=2, c=2), Mesh(a=4, b=2), Mesh(a=8)], ids=str)
@pytest.mark.parametrize("differentiable", [True, False])
def test_every_pair_costs_what_its_shortest_redistribution_costs(
    mesh: Mesh, differentiable: bool
) -> None:
    price = ClusterPrice(machines(), mesh, BUFFER_BYTES)
    random = np.random.default_rng(0)
    checked = 0
    for shape in SHAPES:
        table = reshard_table(mesh, len(shape))
        seconds = table.seconds(shape, ReshardTerms(4, price, differentiable))
        for _ in range(60):
            i = int(random.choice(np.flatnonzero(~table.pending)))
            j = int(random.integers(len(table.states)))
            source, target = table.states[i].layout, table.states[j]
            sizes = zip((*source.dims, *target.dims), shape * 2)
            if any(mesh.degree(axes) > size for axes, size in sizes):
                continue
            if target.pending and not differentiable:
                continue  # says nothing
            if not set(target.partial) <= set(source.partial):
                assert np.isinf(seconds[i, j])
                continue
            expected = redistribution_cost(source, target, shape, 4, mesh, price, differentiable)
            assert seconds[i, j] == pytest.approx(expected, rel=1e-6, abs=1e-13)
            checked += 1
    assert checked > 40


def test_no_movement_goes_over_frozen_axes() -> None:
    mesh = Mesh(a=2, b=2)
    table = reshard_table(mesh, 1)
    price = ClusterPrice(machines(), mesh, BUFFER_BYTES)
    seconds = table.seconds((8,), ReshardTerms(4, price, frozen=("a",)))
    cut = {axis: table.index[Placement(Layout(axis))] for axis in "ab"}
    whole = table.index[Placement.whole(1)]
    assert np.isinf(seconds[cut["a"], whole])
    assert np.isfinite(seconds[cut["b"], whole])
