"""The optimum law: the search equals brute force on small graphs and CP-SAT on middle ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import numpy as np
import pytest

from autopar.errors import InvalidInput
from autopar.solver.cost_graph import CostGraph
from autopar.solver.cp_sat_residual import solve_residual
from autopar.solver.dominated import prune
from autopar.solver.elimination import Elimination
from autopar.solver.message_passing import MessagePassing
from autopar.solver.optimum import Optimiser
from autopar.solver.solve import least_memory, solve
from tests.search.other_solvers import solve_with
from tests.search.random_graphs import SHAPES, brute_force, everything, random_graph


@pytest.mark.parametrize("name", SHAPES)
def test_equals_brute_force(name: str) -> None:
    rng = np.random.default_rng(SHAPES.index(name))
    for _ in range(100):
        graph = random_graph(name, rng)
        solution = solve(graph)
        assert solution.objective == brute_force(graph)
        assert solution.gap == 0
        assert graph.evaluate(solution.choice) == (solution.objective, solution.memory)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_brute_force_where_pairs_are_impossible(name: str) -> None:
    rng = np.random.default_rng(100 + SHAPES.index(name))
    for _ in range(50):
        graph = random_graph(name, rng, impossible=0.15)
        best = brute_force(graph)
        if np.isinf(best):
            with pytest.raises(InvalidInput, match="every node needs a strategy"):
                solve(graph)
        else:
            assert solve(graph).objective == best


@pytest.mark.parametrize("name", SHAPES)
def test_equals_brute_force_under_a_memory_limit(name: str) -> None:
    rng = np.random.default_rng(200 + SHAPES.index(name))
    for _ in range(25):
        graph = random_graph(name, rng, memory=True)
        points = everything(graph)
        amounts = sorted({memory for _, memory in points})
        assert least_memory(graph)[0] == amounts[0]
        limit = amounts[int(len(amounts) * rng.random() * 0.6)]
        solution = solve(graph, memory=limit, tolerance=0.0)
        assert solution.memory <= limit
        assert solution.objective == pytest.approx(brute_force(graph, limit), rel=1e-9)
        assert solution.gap < 1e-6
        loose = solve(graph, memory=limit)  # the tolerance of everyday use
        assert loose.memory <= limit
        assert loose.bound <= brute_force(graph, limit) * (1 + 1e-9) <= loose.objective * (1 + 1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_no_guess_and_no_cutoff_changes_the_optimum(name: str) -> None:
    rng = np.random.default_rng(300 + SHAPES.index(name))
    for _ in range(10):
        graph = random_graph(name, rng, memory=True)
        amounts = sorted({memory for _, memory in everything(graph)})
        limit = amounts[int(len(amounts) * rng.random() * 0.6)]
        best = brute_force(graph, limit)
        for guess in (0.01, 1.0, 100.0):
            solution = solve(graph, memory=limit, tolerance=0.0, multiplier=guess)
            assert solution.memory <= limit
            assert solution.objective == pytest.approx(best, rel=1e-9)
            assert solution.gap < 1e-6
            for cutoff in (0.8 * best, 1.2 * best):
                stopped = solve(graph, memory=limit, tolerance=0.0, multiplier=guess, cutoff=cutoff)
                assert stopped.memory <= limit
                assert stopped.bound <= best * (1 + 1e-9)
                if stopped.objective > best * (1 + 1e-9):
                    assert stopped.bound >= cutoff


@pytest.mark.parametrize(
    "name", ["triangles", "prism", "k33", "k5", "random", "wheel", "grid", "hubs"]
)
def test_the_core_is_solved_where_elimination_may_not(name: str) -> None:
    rng = np.random.default_rng(300 + SHAPES.index(name))
    for _ in range(10):
        graph = random_graph(name, rng, impossible=0.05)
        best = brute_force(graph)
        if np.isinf(best):
            continue
        solution = solve_with(Optimiser(graph.packed, limit=1))
        assert solution.objective == best
        assert solution.gap < 1e-9


def test_rounds_of_dropping_and_eliminating_add_up_to_no_more_than_the_optimum() -> None:
    """Every node is joined to every other, and few can be eliminated at a time."""
    rng = np.random.default_rng(14)
    for trial in range(60):
        graph, sizes = CostGraph(), rng.integers(2, 6, int(rng.integers(5, 8))).tolist()
        for size in sizes:
            graph.add_node(rng.random(size))
        for a, b in itertools.combinations(range(len(sizes)), 2):
            cost = rng.random((sizes[a], sizes[b]))
            cost[rng.random(cost.shape) < (0.1, 0.3)[trial % 2]] = np.inf
            graph.add_edge(a, b, cost)
        best = brute_force(graph)
        if np.isinf(best):
            continue
        for tolerance in (0.0, 0.01):
            solution = solve_with(Optimiser(graph.packed, limit=30), tolerance=tolerance)
            assert solution.bound <= best * (1 + 1e-9)
            assert solution.objective == pytest.approx(best, rel=1e-9)


def test_no_choice_is_below_what_messages_say_of_its_strategies() -> None:
    rng = np.random.default_rng(13)
    closed = 0
    for trial in range(200):
        graph = random_graph(SHAPES[trial % len(SHAPES)], rng, most=4)
        packed, best = graph.packed, brute_force(graph)
        tables = dict(packed.weights(0.0))
        nodes = {scope[0]: table for scope, table in tables.items() if len(scope) == 1}
        edges = {(s[0], s[1]): table for s, table in tables.items() if len(s) == 2}
        messages = MessagePassing(nodes, edges)
        messages.run(int(rng.integers(1, 30)))
        assert messages.bound <= best <= messages.value
        closed += messages.gap < 1e-6
        joint = Elimination({v: len(cost) for v, cost in nodes.items()})
        for scope, table in tables.items():
            joint.add(scope, table)
        everything = joint.joint(tuple(nodes)).reshape([len(cost) for cost in nodes.values()])
        for v, excess in messages.excess().items():
            least = everything.min(axis=tuple(u for u in nodes if u != v))
            assert (messages.bound + excess <= least + 1e-9).all()
    assert closed > 150


def a_tight_limit(graph: CostGraph) -> float:
    """Return the memory that a third of all amounts keep to."""
    amounts = sorted({memory for _, memory in everything(graph)})
    return amounts[len(amounts) // 3]


@pytest.mark.parametrize("name", ["triangles", "k33", "k5", "hubs"])
def test_cp_sat_keeps_a_memory_limit_where_elimination_may_not(name: str) -> None:
    rng = np.random.default_rng(400 + SHAPES.index(name))
    for _ in range(6):
        graph = random_graph(name, rng, memory=True)
        limit = a_tight_limit(graph)
        solution = solve_with(Optimiser(graph.packed, limit=1), limit, tolerance=0.0)
        assert solution.memory <= limit
        assert solution.objective == pytest.approx(brute_force(graph, limit), rel=1e-9)
        assert solution.gap < 1e-6


@pytest.mark.parametrize("name", ["k33", "k5", "wheel", "grid", "hubs"])
def test_a_search_without_time_has_a_choice_and_its_bound(name: str) -> None:
    rng = np.random.default_rng(500 + SHAPES.index(name))
    for _ in range(10):
        graph = random_graph(name, rng, memory=True)
        limit = a_tight_limit(graph)
        solution = solve(graph, memory=limit, tolerance=0.0, seconds=0.0)
        assert solution.memory <= limit
        assert solution.bound <= brute_force(graph, limit) + 1e-9 <= solution.objective + 2e-9
        tangled = Optimiser(graph.packed, limit=1).minimise(deadline=0.0)
        assert tangled.bound <= brute_force(graph) <= tangled.value
        assert graph.packed.evaluate(tangled.choice)[0] == pytest.approx(tangled.value)


def test_the_least_memory_does_not_depend_on_what_was_asked_before() -> None:
    """Messages about costs, which are small numbers, say nothing of bytes, which are large."""
    rng = np.random.default_rng(29)
    for _ in range(5):
        graph, count = CostGraph(), 24
        for _ in range(count):
            graph.add_node(1e-6 * rng.random(6), rng.integers(0, 2**20, 6))
        for a in range(count):
            for b in {(a + step) % count for step in (1, 5, 7)}:
                graph.add_edge(a, b, 1e-6 * rng.random((6, 6)), rng.integers(0, 2**16, (6, 6)))
        asked = Optimiser(graph.packed, limit=1)
        asked.minimise(tolerance=1e-3)
        least, fresh = (made.minimise(np.inf) for made in (asked, Optimiser(graph.packed, limit=1)))
        assert (least.value, least.bound) == (fresh.value, fresh.bound)


def test_equals_cp_sat_on_whole_middle_sized_graphs() -> None:
    rng = np.random.default_rng(7)
    for count, most in ((20, 3), (30, 3), (24, 4)):
        pairs = {
            (other, node)
            for node in range(1, count)
            for other in {node - 1, max(0, node - int(rng.integers(2, 5)))}
        }
        _check_by_cp_sat(rng, count, most, pairs)


@pytest.mark.parametrize("cycles", [1, 2])
def test_equals_cp_sat_on_cycles_that_hubs_join(cycles: int) -> None:
    """Cycles of ten with a chord each, and two hubs that nearly all look into."""
    rng = np.random.default_rng(17)
    for _ in range(3):
        pairs = set()
        for first in range(2, 2 + 10 * cycles, 10):
            pairs |= {(first + i, first + (i + 1) % 10) for i in range(10)}
            pairs.add((first + int(rng.integers(0, 4)), first + int(rng.integers(5, 9))))
            pairs |= {(h, first + i) for h in (0, 1) for i in range(10) if rng.random() < 0.8}
        _check_by_cp_sat(rng, 2 + 10 * cycles, 4, pairs)


def _check_by_cp_sat(
    rng: np.random.Generator, count: int, most: int, pairs: Iterable[tuple[int, int]]
) -> None:
    """Compare the search, and its core alone, with the cost that CP-SAT finds and proves."""
    graph = CostGraph()
    sizes = [int(size) for size in rng.integers(2, most + 1, count)]
    for size in sizes:
        graph.add_node(rng.random(size))
    for a, b in sorted(pairs):
        graph.add_edge(a, b, rng.random((sizes[a], sizes[b])))
    packed = graph.packed  # where nodes may have other numbers
    whole = solve_residual(dict(enumerate(packed.sizes.tolist())), dict(packed.weights(0.0)))
    assert whole.gap < 1e-9
    for solution in (solve(graph), solve_with(Optimiser(packed, limit=1))):
        assert solution.objective == pytest.approx(whole.value, rel=1e-9)
        assert solution.gap < 1e-9


@pytest.mark.parametrize("limit", [None, 40.0])
def test_a_search_ends_in_its_time_with_an_honest_gap(limit: float | None) -> None:
    """All nodes are joined, and no phase proves anything soon."""
    rng, graph, count = np.random.default_rng(23), CostGraph(), 26
    for _ in range(count):
        graph.add_node(rng.random(6), rng.integers(0, 6, 6))
    for a, b in itertools.combinations(range(count), 2):
        graph.add_edge(a, b, rng.random((6, 6)))
    clock = time.process_time()
    solution = solve(graph, limit, tolerance=0.0, seconds=1.0)
    assert time.process_time() - clock < 2.0
    assert 0.0 < solution.gap < 1.0
    assert graph.evaluate(solution.choice) == (solution.objective, solution.memory)


def test_pruning_changes_no_optimum_whatever_the_multiplier() -> None:
    rng = np.random.default_rng(11)
    dropped = 0
    for trial in range(300):
        name = SHAPES[trial % len(SHAPES)]
        graph = random_graph(name, rng, most=4, memory=trial % 2 == 0, impossible=0.05)
        whole, smaller = graph.packed, prune(graph.packed)
        dropped += int(whole.sizes.sum() - smaller.sizes.sum())
        for multiplier in (0.0, 0.5, 3.0, np.inf):
            value = Optimiser(whole, fold=False).minimise(multiplier).value
            assert Optimiser(smaller, fold=False).minimise(multiplier).value == value
    assert dropped > 150


def test_pruning_keeps_the_only_strategy_that_fits() -> None:
    graph = CostGraph()
    a = graph.add_node([1.0, 5.0], memory=[100, 1])  # the second is dearer, and smaller
    b = graph.add_node([0.0])
    graph.add_edge(a, b, [[0.0], [7.0]])
    assert solve(graph, memory=10).choice == [1, 0]
    assert solve(graph).choice == [0, 0]


def test_parts_that_nothing_joins_share_only_the_limit() -> None:
    graph = CostGraph()
    for _ in range(3):
        graph.add_node([1.0, 4.0], memory=[10, 5])
    solution = solve(graph, memory=25, tolerance=0.0)
    assert (solution.objective, solution.memory, sum(solution.choice)) == (6.0, 25.0, 1)


def test_the_empty_graph_costs_nothing() -> None:
    solution = solve(CostGraph())
    assert (solution.choice, solution.objective, solution.gap) == ([], 0.0, 0.0)


@pytest.mark.parametrize("limit", [None, 75.0])
def test_a_node_may_have_more_neighbours_without_a_choice_than_numpy_has_dims(
    limit: float | None,
) -> None:
    graph, count = CostGraph(), 70
    hubs = graph.add_node([1.0, 0.0, 3.0], [3.0, 2.0, 6.0]), graph.add_node([0.0, 1.0], [3.0, 1.0])
    ends = [graph.add_node([2.0], [1.0]) for _ in range(count)]
    for end, other in zip(ends, [*ends[1:], ends[0]]):
        graph.add_edge(hubs[0], end, [[0.0], [1.0], [0.0]])
        graph.add_edge(end, hubs[1], [[1.0, 2.0]])
        graph.add_edge(end, other, [[1.0]])
    solution = solve(graph, memory=limit, tolerance=0.0)
    assert solution.choice[:2] == ([0, 0] if limit is None else [1, 0])
    assert solution.gap < 1e-9
    extra = 0 if limit is None else count - 1
    assert solution.objective == 1 + 4 * count + extra


def test_blocks_may_be_joined_by_more_nodes_without_a_choice_than_numpy_has_dims() -> None:
    graph, width, count = CostGraph(), 70, 8
    before: list[int] = []
    for _ in range(count):
        hub = graph.add_node([1.0, 0.0])
        nodes = [graph.add_node([float(place)]) for place in range(width)]
        for node in nodes:
            graph.add_edge(hub, node, [[0.0], [1.0]])
        for node in before:
            graph.add_edge(node, hub, [[0.0, 1.0]])
        before = nodes
    best = Optimiser(graph.packed).minimise()
    assert best.value == best.bound == count * (1.0 + sum(range(width)))
    assert not best.choice.any()
