"""Solve by CP-SAT what elimination leaves, in whole numbers, with a certified bound.

>>> table = np.array([[3.0, 1.0], [0.0, 2.0]])
>>> answer = solve_residual({0: 2, 1: 2}, {(0, 1): table, (0,): np.array([0.5, 0.0])})
>>> answer.choice, answer.value, answer.gap < 1e-6
({0: 1, 1: 0}, 0.0, True)

Costs are scaled and rounded down, so that the bound of the rounded problem is a bound of the real
one; the value is that of the real tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.solver.cp_sat import new_model, new_solver, outcome, weighted_sum
from autopar.solver.packed_graph import Array

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

Scope = tuple[int, ...]
Factors = Mapping[Scope, Array]

RANGE = 1 << 40  # the largest sum of costs in whole numbers
MEMORY_RANGE = 1 << 46


@dataclass(frozen=True)
class Residual:
    """Hold the best choice found; no choice is cheaper than `bound`.
    Without a choice: impossible if `bound` is infinite, else not found in time."""

    choice: dict[int, int] | None
    value: float
    bound: float

    @property
    def gap(self) -> float:
        return relative_gap(self.value, self.bound)


def relative_gap(value: float, bound: float) -> float:
    """Return by which part of its value the best choice may exceed the optimum."""
    if value == bound or value <= bound:
        return 0.0
    if np.isinf(value):
        return np.inf
    return float((value - bound) / max(abs(value), 1e-300))


def solve_residual(
    sizes: Mapping[int, int],
    factors: Factors,
    *,
    memory: Factors | None = None,
    limit: float = np.inf,
    hint: Mapping[int, int] | None = None,
    tolerance: float = 0.0,
    seconds: float = 60.0,
) -> Residual:
    """Return the cheapest choice by `factors` whose sum of `memory` is at most `limit`.
    After `seconds` of this process it is the best so far."""
    deadline = time.process_time() + seconds
    if memory is None:
        return _by_components(sizes, factors, tolerance, seconds)
    factors, base = _reduced(sizes, factors)
    scale = _scale(factors, RANGE)
    memory_scale = _scale(memory, MEMORY_RANGE)
    model = new_model()
    takes = {v: [model.new_bool_var(f"{v}={s}") for s in range(n)] for v, n in sizes.items()}
    for v in sizes:
        model.add_exactly_one(takes[v])
    bits: list[IntVar] = []
    costs: list[int] = []
    memory_bits: list[IntVar] = []
    memory_weights: list[int] = []
    for scope in sorted({*factors, *memory}):
        shape = tuple(sizes[v] for v in scope)
        table, bytes_ = factors.get(scope), memory.get(scope)
        entry_bits = _entries(model, takes, scope, table, shape)
        for index, bit in entry_bits.items():
            if table is not None and (whole := int(np.floor(table[index] * scale))):
                bits.append(bit)
                costs.append(whole)
            if bytes_ is not None and (whole := int(np.floor(bytes_[index] * memory_scale))):
                memory_bits.append(bit)
                memory_weights.append(whole)
    if memory_bits and np.isfinite(limit):
        model.add(weighted_sum(memory_bits, memory_weights) <= int(np.floor(limit * memory_scale)))
    model.minimize(weighted_sum(bits, costs))
    for v, strategy in (hint or {}).items():
        for s, bit in enumerate(takes[v]):
            model.add_hint(bit, int(s == strategy))
    solver = new_solver(seconds)
    solver.parameters.relative_gap_limit = tolerance
    status = outcome(solver, model, deadline)
    if status == "INFEASIBLE":
        return Residual(None, np.inf, np.inf)
    if status not in ("OPTIMAL", "FEASIBLE"):
        return Residual(None, np.inf, solver.best_objective_bound / scale + base)
    choice = {
        v: next(s for s, bit in enumerate(row) if solver.boolean_value(bit))
        for v, row in takes.items()
    }
    value = base + sum(
        float(table[tuple([choice[v] for v in scope])]) for scope, table in factors.items()
    )
    bound = solver.best_objective_bound / scale + base
    return Residual(choice, value, min(bound, value))


def _by_components(
    sizes: Mapping[int, int], factors: Factors, tolerance: float, seconds: float
) -> Residual:
    """Solve parts that no factor joins separately; only possible without a limit."""
    import networkx as nx  # takes a while to load

    graph = nx.Graph()
    graph.add_nodes_from(sizes)
    for scope in factors:
        nx.add_path(graph, scope)
    deadline = time.process_time() + seconds
    choice: dict[int, int] = {}
    value = bound = 0.0
    missing = False
    for members in sorted(map(sorted, nx.connected_components(graph))):
        tables = {scope: t for scope, t in factors.items() if scope and scope[0] in members}
        inside = {v: sizes[v] for v in members}
        left = max(0.1, deadline - time.process_time())
        answer = solve_residual(inside, tables, memory={}, tolerance=tolerance, seconds=left)
        missing |= answer.choice is None
        choice |= answer.choice or {}
        value, bound = value + answer.value, bound + answer.bound
    return Residual(None if missing else choice, value, bound)


def _entries(
    model: CpModel,
    takes: Mapping[int, list[IntVar]],
    scope: Scope,
    table: Array | None,
    shape: tuple[int, ...],
) -> dict[tuple[int, ...], IntVar]:
    """Return a bool for each possible entry of a table; one entry takes each strategy."""
    possible = np.ones(shape, bool) if table is None else np.isfinite(table)
    if len(scope) == 1:
        v = scope[0]
        for s in np.flatnonzero(~possible).tolist():
            model.add(takes[v][s] == 0)
        return {(s,): takes[v][s] for s in np.flatnonzero(possible).tolist()}
    indices = [tuple(index) for index in np.argwhere(possible).tolist()]
    entries = {index: model.new_bool_var(f"{scope}{index}") for index in indices}
    for dim, v in enumerate(scope):
        rows: list[list[IntVar]] = [[] for _ in takes[v]]
        for index, bit in entries.items():
            rows[index[dim]].append(bit)
        for s, row in enumerate(rows):
            model.add(weighted_sum(row, [1] * len(row)) == takes[v][s])
    return entries


def _reduced(sizes: Mapping[int, int], factors: Factors) -> tuple[dict[Scope, Array], float]:
    """Return smaller tables and a constant, for tighter bounds and finer rounding.
    The least of each row moves to its node, the least of each node to the constant."""
    node_costs = {v: np.zeros(n) for v, n in sizes.items()}
    reduced: dict[Scope, Array] = {}
    for scope, table in factors.items():
        table = np.array(table)
        for dim, v in enumerate(scope):
            others = tuple(d for d in range(table.ndim) if d != dim)
            least = table.min(axis=others) if others else table
            node_costs[v] = node_costs[v] + least
            if others:
                finite = np.where(np.isfinite(least), least, 0.0)
                table = table - finite.reshape([-1 if d == dim else 1 for d in range(table.ndim)])
        if len(scope) > 1:
            reduced[scope] = table
    base = 0.0
    for v, vector in node_costs.items():
        least = vector.min()
        base += float(least) if np.isfinite(least) else 0.0
        reduced[v,] = vector - (least if np.isfinite(least) else 0.0)
    return reduced, base


def _scale(factors: Factors, largest: int) -> float:
    """Return a power of two by which the sum of the largest entries stays below `largest`."""
    total = sum(
        float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in factors.values()
    )
    if total == 0:
        return 1.0
    return float(2.0 ** np.floor(np.log2(largest / total)))
