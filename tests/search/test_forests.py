"""Moves on forests: exact on a forest, and never a loss."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from autopar.solver.elimination import Elimination
from autopar.solver.forests import improved


def random_tables(seed, count, pairs):
    """Return costs of `count` nodes and of pairs of them; and the pairs as seen from each node."""
    rng = np.random.default_rng(seed)
    nodes = {v: rng.random(int(rng.integers(2, 5))) for v in range(count)}
    tables = {(a, b): rng.random((len(nodes[a]), len(nodes[b]))) for a, b in pairs}
    around = {v: [] for v in nodes}
    for (a, b), table in tables.items():
        around[a].append((b, table))
        around[b].append((a, table.T))
    return nodes, tables, around


def value(nodes, tables, choice):
    own = [cost[choice[v]] for v, cost in nodes.items()]
    return math.fsum(own + [table[choice[a], choice[b]] for (a, b), table in tables.items()])


@pytest.mark.parametrize("seed", range(5))
def test_one_move_finds_the_optimum_of_trees(seed):
    rng = np.random.default_rng(seed)
    pairs = [(int(rng.integers(b)), b) for b in range(1, 20) if b != 7]  # two trees
    nodes, tables, around = random_tables(seed, 20, pairs)
    found = improved(nodes, around, dict.fromkeys(nodes, 0), moves=1)
    elimination = Elimination({v: len(cost) for v, cost in nodes.items()})
    for scope, table in (*{(v,): cost for v, cost in nodes.items()}.items(), *tables.items()):
        elimination.add(scope, table)
    elimination.run()
    assert value(nodes, tables, found) == pytest.approx(elimination.constant)


@pytest.mark.parametrize("seed", range(5))
def test_no_move_makes_a_choice_worse(seed):
    pairs = [(a, b) for b in range(30) for a in range(b) if b - a in (1, 3, 9)]
    nodes, tables, around = random_tables(seed, 30, pairs)
    costs, choice = [value(nodes, tables, dict.fromkeys(nodes, 0))], dict.fromkeys(nodes, 0)
    for _ in range(6):
        choice = improved(nodes, around, choice, moves=1)
        costs.append(value(nodes, tables, choice))
    assert all(after <= before + 1e-12 for before, after in pairwise(costs))
    assert costs[-1] < costs[0]
