"""A block of a graph of costs that stands for several is as many of them."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.errors import InvalidInput
from autopar.solver.cost_graph import CostGraph
from autopar.solver.solve import least_memory, solve

BESIDE, TIMES = 3, 9
FEW = 4  # under a limit, where all blocks are a search at length


def chain(seed: int, blocks: int, differs: bool = False) -> tuple[CostGraph, list[list[int]]]:
    """Return a head, equal blocks that all read one node besides the block before, and an end."""
    rng = np.random.default_rng(seed)
    tables = [rng.uniform(1, 9, 3) for _ in range(4)]
    memory = [rng.integers(0, 9, 3).astype(float) for _ in range(4)]
    moves = [rng.uniform(0, 6, (3, 3)) * (1 - np.eye(3)) for _ in range(5)]
    graph = CostGraph()
    shared = graph.add_node(tables[3], memory[3])
    last, found = graph.add_node(rng.uniform(1, 9, 3)), []
    for number in range(blocks):
        first = graph.add_node(tables[0] + differs * number, memory[0])
        weight, second = graph.add_node(tables[1], memory[1]), graph.add_node(tables[2], memory[2])
        graph.add_edge(last, first, moves[0])
        graph.add_edge(weight, second, moves[1])
        graph.add_edge(first, second, moves[2])
        graph.add_edge(shared, second, moves[3])
        found.append([first, weight, second])
        last = second
    graph.add_edge(last, graph.add_node(rng.uniform(1, 9, 3)), moves[4])
    return graph, found


def both(seed: int, times: int = TIMES) -> tuple[CostGraph, CostGraph]:
    """Return the graph with all blocks, and the one in which a block stands for several."""
    whole, _ = chain(seed, 2 * BESIDE + times)
    short, blocks = chain(seed, 2 * BESIDE + 1)
    short.repeat(blocks[BESIDE], times)
    return whole, short


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_all_blocks(seed: int) -> None:
    whole, short = (solve(graph) for graph in both(seed))
    assert short.objective == pytest.approx(whole.objective, rel=1e-9)
    assert short.bound == pytest.approx(whole.bound, rel=1e-9)
    assert len(short.choice) == 2 + 3 * (2 * BESIDE + 1) + 1


@pytest.mark.parametrize("seed", range(12))
def test_what_a_choice_costs_is_what_it_costs_in_all_blocks(seed: int) -> None:
    graphs, rng = both(seed), np.random.default_rng(seed)
    choice = rng.integers(0, 3, 2 + 3 * (2 * BESIDE + 1) + 1).tolist()
    at = 2 + 3 * BESIDE
    long = [*choice[:at], *choice[at : at + 3] * TIMES, *choice[at + 3 :]]
    assert graphs[1].evaluate(choice) == pytest.approx(graphs[0].evaluate(long))


@pytest.mark.parametrize("seed", range(7))
def test_under_a_limit_blocks_are_alike_and_the_bound_is_that_of_all(seed: int) -> None:
    whole, short = both(seed, FEW)
    limit = (least_memory(whole)[0] + solve(whole).memory) / 2
    wanted, found = solve(whole, limit, tolerance=0.0), solve(short, limit, tolerance=0.0)
    assert found.memory <= limit
    assert found.bound <= wanted.objective * (1 + 1e-9)
    assert short.evaluate(found.choice) == pytest.approx((found.objective, found.memory))
    assert found.objective >= wanted.bound * (1 - 1e-9)


def test_a_block_between_others_is_refused() -> None:
    graph, blocks = chain(0, 7, differs=True)
    graph.repeat(blocks[BESIDE], TIMES)
    with pytest.raises(InvalidInput, match="an equal one on each side"):
        solve(graph)
