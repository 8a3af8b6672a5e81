"""The optimum with one node forced equals brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solver.cost_graph import CostGraph
from autopar.solver.forced_choice import forced


def random_graph(rng: np.random.Generator) -> CostGraph:
    graph, sizes = CostGraph(), rng.integers(1, 4, rng.integers(2, 7))
    for size in sizes:
        memory = rng.integers(0, 5, size).astype(float)
        graph.add_node(rng.integers(0, 5, size).astype(float), memory)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        if rng.random() < 0.6:
            cost = rng.integers(0, 6, (sizes[first], sizes[second])).astype(float)
            cost[rng.random(cost.shape) < 0.1] = np.inf
            graph.add_edge(first, second, cost)
    return graph


@pytest.mark.parametrize("multiplier", [0.0, 0.7])
def test_equal_to_brute_force(multiplier):
    rng = np.random.default_rng(0)
    for _ in range(100):
        graph = random_graph(rng)
        node = int(rng.integers(len(graph)))
        expected = np.full(graph.strategies(node), np.inf)
        for choice in itertools.product(*(range(graph.strategies(i)) for i in range(len(graph)))):
            seconds, memory = graph.evaluate(list(choice))
            value = seconds + multiplier * memory
            expected[choice[node]] = min(expected[choice[node]], value)
        np.testing.assert_allclose(forced(graph, node, multiplier), expected)


def test_a_node_inside_repeated_blocks():
    rng = np.random.default_rng(1)
    cost, move = np.array([1.0, 2.0, 3.0]), rng.random((3, 3))
    graph = CostGraph()
    nodes = [graph.add_node(cost) for _ in range(60)]
    for first, second in itertools.pairwise(nodes):
        graph.add_edge(first, second, move)
    ahead = [cost]  # the least of the first i + 1 nodes, by the strategy of the last
    for _ in nodes[1:]:
        ahead.append((ahead[-1][:, None] + move).min(axis=0) + cost)
    behind = [cost]
    for _ in nodes[1:]:
        behind.append((behind[-1][None] + move).min(axis=1) + cost)
    np.testing.assert_allclose(forced(graph, 30), ahead[30] + behind[29] - cost)


def test_a_memory_limit_gives_a_bound():
    graph = CostGraph()
    graph.add_node([3.0, 1.0], memory=[1, 8])
    assert forced(graph, 0, multiplier=0.5, limit=4).tolist() == [1.5, 3.0]


def test_a_node_of_one_strategy_takes_what_the_optimum_does():
    """The node may stand in a chain of others like it."""
    graph = CostGraph()
    nodes = [graph.add_node([1.0]) for _ in range(4)]
    for one, other in itertools.pairwise(nodes):
        graph.add_edge(one, other, [[0.5]])
    assert [forced(graph, node).tolist() for node in nodes] == [[5.5]] * 4
