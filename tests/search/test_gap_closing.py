"""What a multiplier leaves open under a memory limit is closed from the near optima."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import autopar as ap
from autopar.solver.cost_graph import CostGraph
from autopar.solver.gap_closing import CLOSED, close_gap
from autopar.solver.lagrangian import LagrangianSearch
from autopar.solver.optimum import Optimiser
from autopar.solver.solve import least_memory, solve
from benchmarks.gpt import GPT, Sizes
from tests.search.random_graphs import SHAPES, everything, random_graph


def blocks(count: int, seed: int, *, share: bool) -> CostGraph:
    """Return equal blocks of three nodes, that all read one node if they `share` it, between a head
    and an end."""
    rng = np.random.default_rng(seed)
    costs = [rng.uniform(1, 9, 4) for _ in range(4)]
    memory = [rng.integers(0, 999, 4).astype(float) for _ in range(4)]
    moves = [rng.uniform(0, 4, (4, 4)) * (1 - np.eye(4)) for _ in range(5)]
    graph = CostGraph()
    shared = graph.add_node(costs[3], memory[3])
    last = graph.add_node(rng.uniform(1, 9, 4))
    for _ in range(count):
        first, weight, second = (graph.add_node(c, m) for c, m in zip(costs, memory[:3]))
        for ends, move in zip(((last, first), (weight, second), (first, second)), moves):
            graph.add_edge(*ends, move)
        if share:
            graph.add_edge(shared, second, moves[3])
        last = second
    graph.add_edge(last, graph.add_node(rng.uniform(1, 9, 4)), moves[4])
    return graph


@pytest.mark.parametrize("name", SHAPES)
def test_the_near_optima_hold_the_optimum_of_small_graphs(name: str) -> None:
    rng, closed = np.random.default_rng(700 + SHAPES.index(name)), 0
    for trial in range(25):
        graph = random_graph(name, rng, memory=True, impossible=0.1 * (trial % 2))
        points = [point for point in everything(graph) if np.isfinite(point[0])]
        amounts = sorted({memory for _, memory in points})
        limit = amounts[int(len(amounts) * rng.random() * 0.6)] if amounts else 0.0
        best = min((cost for cost, memory in points if memory <= limit), default=np.inf)
        search = LagrangianSearch(graph.packed, limit, Optimiser(graph.packed), tolerance=0.0)
        if np.isinf(best) or not search.relax():
            continue
        close_gap(search, 0.0)
        assert search.bound <= best * (1 + 1e-9) <= search.value * (1 + 2e-9)
        assert search.memory <= limit
        closed += search.gap < 1e-6
        assert search.gap < 1e-6 or search.multiplier == 0
    assert closed > 1


@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_of_a_chain_of_blocks_is_that_of_the_same_graph_unfolded(seed: int) -> None:
    graph = blocks(5, seed, share=True)
    free, least = solve(graph).memory, least_memory(graph)[0]
    for share in (0.2, 0.5, 0.8):
        limit, found = least + share * (free - least), []
        for fold in (True, False):
            optimiser = Optimiser(graph.packed, fold=fold)
            assert bool(optimiser.chains) == fold
            search = LagrangianSearch(graph.packed, limit, optimiser, tolerance=0.0)
            search.relax()
            close_gap(search, 0.0)
            assert search.gap < 1e-6
            assert graph.packed.evaluate(search.choice) == (search.value, search.memory)
            found.append(search.value)
        assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("count", [12, 96])
def test_the_gap_of_deep_programs_is_closed_as_that_of_shallow_ones(count: int) -> None:
    graph = blocks(count, 0, share=False)
    for share in (0.3, 0.7):
        free, least = solve(graph).memory, least_memory(graph)[0]
        solution = solve(graph, least + share * (free - least))
        assert solution.gap <= CLOSED


@pytest.mark.parametrize("layers", [12, 96])
def test_a_plan_for_half_of_the_memory_fits_with_a_closed_gap(layers: int) -> None:
    sizes = Sizes(hidden=1024, heads=16, sequence=512, batch=64, layers=layers, vocabulary=8192)
    with torch.device("meta"):
        model, ids = GPT(sizes), torch.zeros(sizes.batch, sizes.sequence, dtype=torch.long)
    mesh, machines = ap.Mesh(x=8, y=8), ap.Cluster.preset("dgx-h100", 8)
    options = {"pipeline": None, "recompute": None, "states": "whole", "microbatches": 1}
    free = ap.plan(model, (ids, ids), mesh=mesh, cluster=machines, **options)
    limit = 0.5 * free.memory.peak
    plan = ap.plan(model, (ids, ids), mesh=mesh, cluster=machines, memory=limit, **options)
    assert plan.memory.peak <= limit
    assert plan.search is not None
    assert plan.search.gap <= 1e-4
    assert free.seconds < plan.seconds
