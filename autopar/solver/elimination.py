"""Exact elimination: a node leaves, and what it cost is kept as a table over its neighbours.

>>> elimination = Elimination({0: 2, 1: 2, 2: 2})
>>> elimination.add((0, 1), np.array([[0.0, 9.0], [9.0, 0.0]]))
>>> elimination.add((1, 2), np.array([[0.0, 9.0], [9.0, 0.0]]))
>>> elimination.add((0,), np.array([5.0, 0.0]))
>>> elimination.run()
>>> elimination.constant, elimination.complete({})
(0.0, {2: 1, 1: 1, 0: 1})

A node with one or two neighbours leaves a vector or a matrix (a min-plus product), whatever the
direction of its edges; this holds MindSpore's six eliminations. A node with more neighbours leaves
a table of higher order, as long as that stays small. What cannot leave is the core.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from autopar.solver.packed_graph import Array

Scope = tuple[int, ...]

LIMIT = 1 << 24  # entries of the join of a node with more than two neighbours
_AT_ONCE = 1 << 17  # entries of a join that is computed in one piece


class EliminationStep(NamedTuple):
    """A node leaves a table to those around it; how many entries the join has that it is of."""

    node: int
    around: Scope
    entries: int


def elimination_order(
    sizes: Mapping[int, int],
    around: dict[int, set[int]],
    limit: int = LIMIT,
    keep: Collection[int] = (),
) -> list[EliminationStep]:
    """In which order nodes can leave, the cheapest first: all but `keep`, and what is too tangled.

    `around` has the neighbours of each, and in the end those of what is left."""
    kept = set(keep)

    def weight_of(v: int) -> int:
        return math.prod(sizes[u] for u in around[v]) * sizes[v]

    weights = {v: weight_of(v) for v in around if v not in kept}
    heap = [(weight, v) for v, weight in weights.items()]
    heapq.heapify(heap)
    found: list[EliminationStep] = []
    while heap:
        weight, v = heapq.heappop(heap)
        if weights.get(v) != weight or (len(around[v]) > 2 and weight > limit):
            continue
        near = around.pop(v)
        found.append(EliminationStep(v, tuple(sorted(near)), weight))
        del weights[v]
        for u in near:
            around[u] |= near
            around[u] -= {u, v}
        for u in near - kept:
            weights[u] = weight_of(u)
            heapq.heappush(heap, (weights[u], u))
    return found


class Elimination:
    """Variables with their sizes, tables over them, and the trail of those eliminated."""

    def __init__(self, sizes: Mapping[int, int], limit: int = LIMIT) -> None:
        self.sizes, self.limit = sizes, limit
        self.constant = 0.0
        self.factors: dict[Scope, Array] = {}
        self.trail: list[tuple[int, list[tuple[Scope, Array]]]] = []
        self._scopes: dict[int, set[Scope]] = {v: set() for v in sizes}
        self._made: dict[tuple[object, ...], tuple[Array, tuple[Array, ...]]] = {}

    def add(self, scope: Scope, table: Array) -> None:
        """Add a table over the variables of `scope`, in rows.

        A variable with one strategy is no dim of any table, of which numpy allows but a few."""
        scope = self._open(scope)
        shape = tuple(self.sizes[v] for v in scope)
        if (whole := table).shape != shape:
            table = self._once(lambda: whole.reshape(shape), whole, of=shape)
        if len(set(scope)) < len(scope):
            scope, table = _diagonal(scope, table)
        ordered = tuple(sorted(scope))
        if ordered != scope:
            table = table.transpose([scope.index(v) for v in ordered])
        if not ordered:
            self.constant += float(table)
            return
        present = self.factors.get(ordered)
        if present is not None:
            table = self._once(lambda: present + table, present, table)
        self.factors[ordered] = table
        for v in ordered:
            self._scopes[v].add(ordered)

    @property
    def core(self) -> list[int]:
        """The variables that are left."""
        return list(self._scopes)

    @property
    def entries(self) -> int:
        """The entries of all tables that are left."""
        return sum(table.size for table in self.factors.values())

    def neighbours(self, v: int) -> set[int]:
        return set().union(*self._scopes[v]) - {v}

    def order(self, keep: Collection[int] = ()) -> list[EliminationStep]:
        """All that can leave but `keep`, the cheapest first."""
        around = {v: self.neighbours(v) for v in self._scopes}
        return elimination_order(self.sizes, around, self.limit, keep)

    def run(self, keep: Collection[int] = ()) -> None:
        """Eliminate all that can be, the cheapest first; never those to `keep`."""
        for step in self.order(keep):
            self._eliminate(step.node, step.around)

    def complete(self, choice: dict[int, int]) -> dict[int, int]:
        """The best choice of every eliminated variable, given those of the others."""
        for v, parts in reversed(self.trail):
            total: Array | float = 0.0
            for scope, table in parts:
                total = total + table[tuple([slice(None) if u == v else choice[u] for u in scope])]
            choice[v] = int(np.argmin(total))
        return choice

    def marginals(self) -> dict[int, Array]:
        """For each eliminated variable, the least total with each of its strategies.

        Back along the trail: what the rest costs at least, as a table over the neighbours that a
        variable had, is the total of the bucket its message went to, less that message."""
        bucket_of = {v: at for at, (v, _) in enumerate(self.trail)}
        outside: dict[int, Array | float] = {}
        children: dict[int, list[tuple[int, Scope, Array]]] = {}
        scopes: list[Scope] = []
        for v, parts in self.trail:
            around = tuple(sorted(set().union(*(scope for scope, _ in parts)) - {v}))
            scopes.append((v, *around))
            if around:
                message = _least(parts, v, around, [self.sizes[u] for u in around])
                first = min(around, key=bucket_of.__getitem__)
                children.setdefault(first, []).append((v, around, message))
            else:
                alone = float(np.min(sum((table for _, table in parts), np.zeros(1))))
                outside[v] = self.constant - alone if np.isfinite(alone) else np.inf
        found: dict[int, Array] = {}
        for (v, parts), scope in zip(reversed(self.trail), reversed(scopes)):
            total: Array = np.full([self.sizes[u] for u in scope], 0.0)
            for own, table in parts:
                total += _aligned(own, table, scope)
            total += outside.pop(v)
            found[v] = total.min(axis=tuple(range(1, total.ndim)))
            for child, around, message in children.pop(v, ()):
                gone = tuple(dim for dim, u in enumerate(scope) if u not in around)
                rest = total.min(axis=gone)
                left = tuple(u for u in scope if u in around)
                rest = rest.transpose([left.index(u) for u in around])
                possible = np.isfinite(message)
                outside[child] = np.subtract(
                    rest, message, where=possible, out=np.zeros_like(message)
                )
        return found

    def joint(self, scope: Scope) -> Array:
        """The sum of all that is left, over `scope` in rows."""
        scope = self._open(scope)
        total = np.full([self.sizes[v] for v in scope], self.constant)
        for own, table in self.factors.items():
            total += _aligned(own, table, scope)
        return total.reshape(-1)

    def _open(self, scope: Scope) -> Scope:
        """The variables of a scope that have a choice."""
        return tuple(v for v in scope if self.sizes[v] > 1)

    def _eliminate(self, v: int, around: Scope) -> None:
        scopes = sorted(self._scopes.pop(v))
        parts = [(scope, self.factors.pop(scope)) for scope in scopes]
        for scope in scopes:
            for u in scope:
                if u != v:
                    self._scopes[u].discard(scope)
        self.trail.append((v, parts))
        if not parts:
            return
        shape = [self.sizes[u] for u in around]
        scope = (v, *around)
        places = tuple(tuple(scope.index(u) for u in own) for own, _ in parts)
        tables = [table for _, table in parts]
        self.add(around, self._once(lambda: _least(parts, v, around, shape), *tables, of=places))

    def _once(self, make: Callable[[], Array], *given: Array, of: object = None) -> Array:
        """What is made of the same arrays in the same way, as in equal blocks, is made once."""
        key = of, *map(id, given)
        if key not in self._made:
            self._made[key] = make(), given
        return self._made[key][0]


def least_product(left: Array, right: Array) -> Array:
    """Min-plus product over the last two dims: min over z of left[..., x, z] + right[..., z, y]."""
    entries = left.size * right.shape[-1]
    if entries <= _AT_ONCE:
        return (left[..., :, :, None] + right[..., None, :, :]).min(axis=-2)
    out = np.full((*left.shape[:-1], right.shape[-1]), np.inf)
    spare = np.empty_like(out)
    for z in range(left.shape[-1]):
        np.add(left[..., :, z, None], right[..., z, None, :], out=spare)
        np.minimum(out, spare, out=out)
    return out


def _least(parts: list[tuple[Scope, Array]], v: int, around: Scope, shape: list[int]) -> Array:
    """The sum of `parts`, as a table over `around`, at the best strategy of `v`."""
    tables = sorted((_aligned(scope, t, (v, *around)) for scope, t in parts), key=np.size)
    if len(tables) > 2:  # add the small ones first, to pass over the whole join only once
        small = tables[0]
        for table in tables[1:-1]:
            small = small + table
        tables = [small, tables[-1]]
    if tables[0].shape[0] * math.prod(shape) <= _AT_ONCE:
        joined = tables[0] + tables[1] if len(tables) == 2 else tables[0]
        least: Array = joined.min(axis=0)
        return least
    if len(tables) == 1:
        return np.asarray(tables[0].min(axis=0))
    out, spare = np.full(shape, np.inf), np.empty(shape)
    for first, second in zip(*tables):
        np.add(first, second, out=spare)
        np.minimum(out, spare, out=out)
    return out


def _aligned(own: Scope, table: Array, scope: Scope) -> Array:
    """`table` over `own` with a dim for each variable of `scope`, of size 1 where it has none."""
    table = table.transpose([own.index(v) for v in scope if v in own])
    return table[tuple([slice(None) if v in own else None for v in scope])]


def _diagonal(scope: Scope, table: Array) -> tuple[Scope, Array]:
    """A variable that stands twice in the scope takes one value."""
    first, second = next(
        (i, j) for j in range(len(scope)) for i in range(j) if scope[i] == scope[j]
    )
    table = np.diagonal(table, axis1=first, axis2=second)  # the common dim comes last
    scope = (*(v for v in scope if v != scope[first]), scope[first])
    return (scope, table) if len(set(scope)) == len(scope) else _diagonal(scope, table)
