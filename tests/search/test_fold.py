"""Repeated blocks: found where they are, folded without changing the optimum."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autopar.solver.cost_graph import CostGraph
from autopar.solver.dominated import prune
from autopar.solver.fold import find_runs
from autopar.solver.optimum import Optimiser
from autopar.solver.solve import solve
from tests.search.other_solvers import solve_with
from tests.search.random_graphs import periodic_graph


@pytest.mark.parametrize("seed", range(8))
def test_the_folded_optimum_is_the_unfolded_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    folded = 0
    for _ in range(30):
        graph = periodic_graph(rng, int(rng.integers(3, 12)), int(rng.integers(1, 6)))
        plain, folding = Optimiser(graph.packed, fold=False), Optimiser(graph.packed)
        for multiplier in (0.0, 0.4, np.inf):
            best, found = plain.minimise(multiplier), folding.minimise(multiplier)
            assert found.value == pytest.approx(best.value, rel=1e-12)
            cost, memory = graph.packed.evaluate(found.choice)
            weight = memory if np.isinf(multiplier) else cost + multiplier * memory
            assert weight == pytest.approx(best.value, rel=1e-12)
        folded += bool(folding.chains)  # those that are too tangled are gone by now
        assert solve(graph).objective == pytest.approx(plain.minimise().value, rel=1e-12)
    assert folded > 12


def layered(layers: int, *, parameters_first: bool = False) -> CostGraph:
    """Return layers of a norm, a linear with a parameter and a sum; all read one mask."""
    rng = np.random.default_rng(3)
    norm, linear, weight, add, stream = (rng.random(5) for _ in range(5))
    move = rng.random((5, 5))
    graph = CostGraph()
    mask = graph.add_node(rng.random(3))
    masked = rng.random((3, 5))
    first = [graph.add_node(weight) for _ in range(layers)] if parameters_first else []
    before = graph.add_node(rng.random(5))
    for layer in range(layers):
        a = graph.add_node(norm)
        w = first[layer] if first else graph.add_node(weight)
        b, c, d = graph.add_node(linear), graph.add_node(add), graph.add_node(stream)
        for low, high in ((before, a), (a, b), (w, b), (b, c), (before, c), (c, d)):
            graph.add_edge(low, high, move)
        graph.add_edge(mask, b, masked)
        before = d
    return graph


@pytest.mark.parametrize("parameters_first", [False, True])
def test_one_run_with_one_crossing_tensor_and_a_shared_mask(parameters_first: bool) -> None:
    graph = layered(20, parameters_first=parameters_first)
    runs = find_runs(graph.packed)
    assert len(runs) == 1
    assert runs[0].period == 5
    assert runs[0].count >= 18
    assert len(runs[0].crossing) == 1
    assert len(runs[0].shared) == 1


def test_two_kinds_of_blocks_are_two_runs() -> None:
    rng = np.random.default_rng(5)
    graph = CostGraph()
    last = graph.add_node(rng.random(4))
    for _ in range(2):
        costs, moves = rng.random((3, 4)), rng.random((3, 4, 4))
        tables = [(cost, move) for cost, move in zip(costs, moves)]
        for _ in range(6):
            for cost, move in tables:
                node = graph.add_node(cost)
                graph.add_edge(last, node, move)
                last = node
    runs = find_runs(graph.packed)
    assert sorted((run.period, run.count >= 5) for run in runs) == [(3, True), (3, True)]
    assert solve(graph).objective == pytest.approx(
        solve_with(Optimiser(prune(graph.packed), fold=False)).objective
    )


def test_alternating_blocks_fold_as_pairs() -> None:
    rng = np.random.default_rng(6)
    costs, move = rng.random((2, 4)), rng.random((4, 4))
    graph = CostGraph()
    nodes = [graph.add_node(costs[i % 2]) for i in range(40)]
    for a, b in pairwise(nodes):
        graph.add_edge(a, b, move)
    (run,) = find_runs(graph.packed)
    assert run.period == 2


def test_nothing_repeats_in_a_graph_without_blocks() -> None:
    rng = np.random.default_rng(8)
    graph = CostGraph()
    nodes = [graph.add_node(rng.random(3)) for _ in range(30)]
    for a, b in pairwise(nodes):
        graph.add_edge(a, b, rng.random((3, 3)))
    assert find_runs(graph.packed) == []


def test_work_does_not_grow_with_depth() -> None:
    sizes = [solve(layered(layers)).sizes for layers in (12, 96)]
    assert sizes[0].folded_nodes == sizes[1].folded_nodes
    assert sizes[1].nodes > 7 * sizes[0].nodes
