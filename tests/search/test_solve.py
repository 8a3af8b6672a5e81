"""What a caller sees: limits, bounds, progress, interrupts, errors."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import signal
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from autopar import solver
from autopar.errors import ExecutionError, InvalidInput
from autopar.solver.cost_graph import CostGraph
from autopar.solver.cp_sat import new_model
from autopar.solver.cp_sat_residual import solve_residual
from autopar.solver.lagrangian import LagrangianSearch
from autopar.solver.optimum import Optimiser
from autopar.solver.solve import solve
from tests.search.other_solvers import SOLVERS, solve_with
from tests.search.random_graphs import SHAPES, brute_force, random_graph


def chain(length: int, memory: bool = True) -> CostGraph:
    rng = np.random.default_rng(1)
    costs, bytes_, move = rng.random((3, 6)), rng.random((3, 6)), rng.random((6, 6)) * 0.3
    graph = CostGraph()
    for node in range(length):
        kind = node % 3
        graph.add_node(costs[kind], (1 - costs[kind]) * bytes_[kind] if memory else None)
        if node:
            graph.add_edge(node - 1, node, move)
    return graph


def test_a_limit_on_a_long_chain_is_met_within_a_percent() -> None:
    graph = chain(300)
    free = solve(graph)
    for share in (0.3, 0.6, 0.9):
        solution = solve(graph, memory=free.memory * share)
        assert solution.memory <= free.memory * share
        assert solution.gap <= 0.01
        assert solution.multiplier > 0
        assert free.objective < solution.objective


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    graph = chain(30)
    free = solve(graph)
    assert solve(graph, memory=free.memory).choice == free.choice


def test_a_limit_that_nothing_meets_names_the_least_memory() -> None:
    graph = CostGraph()
    for _ in range(3):
        graph.add_node([1.0, 2.0], memory=[4000, 2000])
    with pytest.raises(InvalidInput, match=r"least possible is 6,000 bytes"):
        solve(graph, memory=5000)


def test_large_tables_of_an_unfinished_elimination_do_not_reach_cp_sat() -> None:
    rng = np.random.default_rng(0)
    graph, planted = CostGraph(), rng.integers(0, 10, 11).tolist()
    for best in planted:
        graph.add_node(np.arange(10) != best)
    hubs = range(8)  # joined all to all: elimination cannot take them
    edges = [(a, b) for b in hubs for a in range(b)]
    edges += [(hub, leaf) for leaf in (8, 9, 10) for hub in range(6)]  # tables over six hubs
    for a, b in edges:
        move = 1 + rng.random((10, 10))
        move[planted[a], planted[b]] = 0
        graph.add_edge(a, b, move)
    solution = solve_with(Optimiser(graph.packed))
    assert (solution.choice, solution.objective, solution.gap) == (planted, 0.0, 0.0)
    assert solution.sizes.core_nodes == 11


def test_the_same_search_gives_the_same_choice() -> None:
    known = chain(30)
    limit = solve(known).memory * 0.5
    first, second = solve(chain(30), limit), solve(chain(30), limit)
    assert first.choice == second.choice
    again = solve(known, limit)  # of equally good choices, a graph that is known may give another
    assert (again.objective, again.memory) == (first.objective, first.memory)


@pytest.mark.parametrize("algorithm", ["recursive", "propagate"])
def test_quick_algorithms_stay_between_bound_and_nothing(algorithm: str) -> None:
    rng = np.random.default_rng(2)
    for trial in range(100):
        graph = random_graph(SHAPES[trial % len(SHAPES)], rng)
        solution = SOLVERS[algorithm](graph)
        assert solution.bound <= brute_force(graph) <= solution.objective
        assert graph.evaluate(solution.choice)[0] == solution.objective


def test_propagation_follows_a_pinned_node() -> None:
    graph = CostGraph()
    nodes = [graph.add_node([0.0, 0.0, 0.0]) for _ in range(4)] + [graph.add_node([1.0])]
    apart = 1.0 - np.eye(3)
    for a, b in pairwise(nodes[:4]):
        graph.add_edge(a, b, apart)
    graph.add_edge(nodes[4], nodes[3], [[1.0, 1.0, 0.0]])
    assert SOLVERS["propagate"](graph).choice == [2, 2, 2, 2, 0]


def test_progress_names_the_phases() -> None:
    phases: list[str] = []
    graph = chain(20)
    solve(graph, solve(chain(20)).memory * 0.5, lambda phase, detail: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["prune", "fold", "eliminate", "memory", "done"]


def interrupt_in(wanted: str):
    def progress(phase: str, detail: str) -> None:
        if phase == wanted:
            raise KeyboardInterrupt

    return progress


def test_an_interrupt_before_the_first_plan_is_a_clean_error() -> None:
    with pytest.raises(ExecutionError, match="interrupt"):
        solve(chain(60), report=interrupt_in("fold"))


def test_an_interrupt_under_a_limit_gives_the_best_so_far_with_its_bound() -> None:
    graph = chain(20)
    limit = solve(graph).memory * 0.5
    solution = solve(graph, limit, interrupt_in("memory"))
    assert solution.interrupted
    assert solution.memory <= limit
    assert 0 < solution.bound <= solve(graph, limit).objective


def test_ctrl_c_stops_cp_sat() -> None:
    rng = np.random.default_rng(0)
    sizes = dict.fromkeys(range(24), 8)
    factors = {
        (a, b): rng.random((8, 8)) for a in sizes for b in sizes if a < b
    }  # far too much to prove in a minute
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    # A shell starts what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    new_model()  # OR-tools loads: an interrupt of that is another matter
    start = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            solve_residual(sizes, factors, seconds=100)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("cost", "memory"),
    [
        ([], None),
        ([[1.0]], None),
        ([float("nan")], None),
        ([-np.inf, 1.0], None),
        ([1.0, 2.0], [1.0]),
        ([1.0], [np.inf]),
    ],
)
def test_bad_node_costs_are_refused(cost: list, memory: list | None) -> None:
    with pytest.raises(InvalidInput):
        CostGraph().add_node(cost, memory)


def test_bad_edges_are_refused() -> None:
    graph = CostGraph()
    a, b = graph.add_node([1.0, 2.0], name="up"), graph.add_node([1.0, 2.0, 3.0])
    with pytest.raises(InvalidInput, match=r"shape \(3, 2\) between 'up' with 2"):
        graph.add_edge(a, b, np.zeros((3, 2)))
    with pytest.raises(InvalidInput, match="two different nodes"):
        graph.add_edge(a, a, np.zeros((2, 2)))
    with pytest.raises(InvalidInput, match="two different nodes"):
        graph.add_edge(a, 7, np.zeros((2, 2)))


def test_a_tensor_read_twice_is_paid_for_twice() -> None:
    graph = CostGraph()
    a, b = graph.add_node([0.0]), graph.add_node([0.0])
    for _ in range(2):
        graph.add_edge(a, b, [[3.0]], [[2.0]])
    graph.add_edge(b, a, [[1.0]])
    assert graph.evaluate([0, 0]) == (7.0, 4.0)
    assert solve(graph).objective == 7.0


def test_the_tours_in_the_docstrings() -> None:
    names = [module.name for module in pkgutil.iter_modules(solver.__path__, "autopar.solver.")]
    for name in [*names, "tests.search.other_solvers"]:
        assert doctest.testmod(importlib.import_module(name)).failed == 0, name


def test_the_multiplier_goes_on_from_a_choice_of_least_memory_that_is_dear():
    """Any choice of the least memory may be found first: a dear one ends no search."""
    graph = CostGraph()
    for _ in range(100):
        graph.add_node([1.0, 100.0, 2.0], memory=[8, 4, 4])
    search = LagrangianSearch(graph.packed, 600, Optimiser(graph.packed))
    search.relax()
    assert (round(search.value, 6), search.memory) == (150.0, 600.0)
    assert search.gap <= 0.01


def test_blocks_that_cannot_be_alike_are_refused() -> None:
    """One block stands for four, and no two in a row may have one strategy."""
    graph, apart = CostGraph(), np.array([[np.inf, 0.0], [0.0, np.inf]])
    nodes = [graph.add_node(np.array([1.0, 2.0])) for _ in range(5)]
    for one, other in pairwise(nodes):
        graph.add_edge(one, other, apart)
    graph.repeat(nodes[2:3], 4)
    with pytest.raises(InvalidInput, match="one strategy for each node in all of them"):
        solve(graph)
