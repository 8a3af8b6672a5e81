"""Eliminate nodes exactly: what a node cost becomes a table over its neighbours.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from autopar.solver.packed_graph import Array

Scope = tuple[int, ...]

LIMIT = 1 << 24  # entries of the join of a node with more than two neighbours
_AT_ONCE = 1 << 17  # entries of a join that is computed in one piece


class EliminationStep(NamedTuple):
    """Record a node that leaves a table over its neighbours, and the entries of its join."""

    node: int
    neighbours: Scope
    entries: int


def elimination_order(
    sizes: Mapping[int, int],
    neighbours: dict[int, set[int]],
    limit: int = LIMIT,
    keep: Collection[int] = (),
) -> list[EliminationStep]:
    """Return the order in which nodes can leave, cheapest first: all but `keep` and tangled ones.
    `neighbours` has those of each node, and in the end those of what is left."""
    fixed = set(keep)

    def weight_of(v: int) -> int:
        return math.prod(sizes[u] for u in neighbours[v]) * sizes[v]

    weights = {v: weight_of(v) for v in neighbours if v not in fixed}
    heap = [(weight, v) for v, weight in weights.items()]
    heapq.heapify(heap)
    steps: list[EliminationStep] = []
    while heap:
        weight, v = heapq.heappop(heap)
        if weights.get(v) != weight or (len(neighbours[v]) > 2 and weight > limit):
            continue
        adjacent = neighbours.pop(v)
        steps.append(EliminationStep(v, tuple(sorted(adjacent)), weight))
        del weights[v]
        for u in adjacent:
            neighbours[u] |= adjacent
            neighbours[u] -= {u, v}
        for u in adjacent - fixed:
            weights[u] = weight_of(u)
            heapq.heappush(heap, (weights[u], u))
    return steps


class Elimination:
    """Eliminate variables from a sum of tables, with a trail to complete a choice."""

    def __init__(self, sizes: Mapping[int, int], limit: int = LIMIT) -> None:
        self.sizes, self.limit = sizes, limit
        self.constant = 0.0
        self.factors: dict[Scope, Array] = {}
        self.trail: list[tuple[int, list[tuple[Scope, Array]]]] = []
        self._scopes: dict[int, set[Scope]] = {v: set() for v in sizes}
        self._computed: dict[tuple[object, ...], tuple[Array, tuple[Array, ...]]] = {}

    def add(self, scope: Scope, table: Array) -> None:
        """Add a table over the variables of `scope`, in rows.
        A variable with one strategy is no dim of any table, of which numpy allows but a few."""
        scope = self._open(scope)
        shape = tuple(self.sizes[v] for v in scope)
        if (original := table).shape != shape:
            table = self._once(lambda: original.reshape(shape), original, form=shape)
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
        """Return the variables that are left."""
        return list(self._scopes)

    @property
    def entries(self) -> int:
        """Return the number of entries in all tables that are left."""
        return sum(table.size for table in self.factors.values())

    def neighbours(self, v: int) -> set[int]:
        return set().union(*self._scopes[v]) - {v}

    def order(self, keep: Collection[int] = ()) -> list[EliminationStep]:
        """Return the steps for all that can leave but `keep`, the cheapest first."""
        neighbours = {v: self.neighbours(v) for v in self._scopes}
        return elimination_order(self.sizes, neighbours, self.limit, keep)

    def run(self, keep: Collection[int] = ()) -> None:
        """Eliminate all that can be, the cheapest first; never those in `keep`."""
        for step in self.order(keep):
            self._eliminate(step.node, step.neighbours)

    def complete(self, choice: dict[int, int]) -> dict[int, int]:
        """Return the best choice of every eliminated variable, given those of the others."""
        for v, parts in reversed(self.trail):
            total: Array | float = 0.0
            for scope, table in parts:
                total = total + table[tuple([slice(None) if u == v else choice[u] for u in scope])]
            choice[v] = int(np.argmin(total))
        return choice

    def marginals(self) -> dict[int, Array]:
        """Return for each eliminated variable the least total with each of its strategies."""
        return {
            scope[0]: total.min(axis=tuple(range(1, total.ndim))) for scope, total in self.totals()
        }

    def totals(self) -> Iterator[tuple[Scope, Array]]:
        """Yield for each eliminated variable, the last first, it with the neighbours that it had,
        and the least total with each of their strategies.

        Back along the trail: what the rest costs at least, as a table over the neighbours that a
        variable had, is the total of the bucket its message went to, less that message."""
        bucket_of = {v: at for at, (v, _) in enumerate(self.trail)}
        outside: dict[int, Array | float] = {}
        children: dict[int, list[tuple[int, Scope, Array]]] = {}
        scopes: list[Scope] = []
        for v, parts in self.trail:
            neighbours = tuple(sorted(set().union(*(scope for scope, _ in parts)) - {v}))
            scopes.append((v, *neighbours))
            if neighbours:
                message = _least(parts, v, neighbours, [self.sizes[u] for u in neighbours])
                first = min(neighbours, key=bucket_of.__getitem__)
                children.setdefault(first, []).append((v, neighbours, message))
            else:
                alone = float(np.min(sum((table for _, table in parts), np.zeros(1))))
                outside[v] = self.constant - alone if np.isfinite(alone) else np.inf
        for (v, parts), scope in zip(reversed(self.trail), reversed(scopes)):
            total: Array = np.full([self.sizes[u] for u in scope], 0.0)
            for part_scope, table in parts:
                total += aligned(part_scope, table, scope)
            total += outside.pop(v)
            yield scope, total
            for child, neighbours, message in children.pop(v, ()):
                summed_dims = tuple(dim for dim, u in enumerate(scope) if u not in neighbours)
                rest = total.min(axis=summed_dims)
                remaining = tuple(u for u in scope if u in neighbours)
                rest = rest.transpose([remaining.index(u) for u in neighbours])
                possible = np.isfinite(message)
                outside[child] = np.subtract(
                    rest, message, where=possible, out=np.zeros_like(message)
                )

    def joint(self, scope: Scope) -> Array:
        """Return the sum of all that is left, over `scope` in rows."""
        scope = self._open(scope)
        total = np.full([self.sizes[v] for v in scope], self.constant)
        for part_scope, table in self.factors.items():
            total += aligned(part_scope, table, scope)
        return total.reshape(-1)

    def _open(self, scope: Scope) -> Scope:
        """Return the variables of a scope that have a choice."""
        return tuple(v for v in scope if self.sizes[v] > 1)

    def _eliminate(self, v: int, neighbours: Scope) -> None:
        scopes = sorted(self._scopes.pop(v))
        parts = [(scope, self.factors.pop(scope)) for scope in scopes]
        for scope in scopes:
            for u in scope:
                if u != v:
                    self._scopes[u].discard(scope)
        self.trail.append((v, parts))
        if not parts:
            return
        shape = [self.sizes[u] for u in neighbours]
        scope = (v, *neighbours)
        places = tuple(tuple(scope.index(u) for u in part_scope) for part_scope, _ in parts)
        tables = [table for _, table in parts]
        table = self._once(lambda: _least(parts, v, neighbours, shape), *tables, form=places)
        self.add(neighbours, table)

    def _once(self, compute: Callable[[], Array], *inputs: Array, form: object = None) -> Array:
        """Compute a table once for equal inputs and form, as equal blocks have them."""
        key = form, *map(id, inputs)
        if key not in self._computed:
            self._computed[key] = compute(), inputs
        return self._computed[key][0]


def least_product(left: Array, right: Array) -> Array:
    """Return the min-plus product over the last two dims of `left` and the last two of `right`."""
    entries = left.size * right.shape[-1]
    if entries <= _AT_ONCE:
        return (left[..., :, :, None] + right[..., None, :, :]).min(axis=-2)
    out = np.full((*left.shape[:-1], right.shape[-1]), np.inf)
    buffer = np.empty_like(out)
    for z in range(left.shape[-1]):
        np.add(left[..., :, z, None], right[..., z, None, :], out=buffer)
        np.minimum(out, buffer, out=out)
    return out


def _least(parts: list[tuple[Scope, Array]], v: int, neighbours: Scope, shape: list[int]) -> Array:
    """Return the sum of `parts` as a table over `neighbours`, at the best strategy of `v`."""
    tables = sorted((aligned(scope, t, (v, *neighbours)) for scope, t in parts), key=np.size)
    if len(tables) > 2:  # add the small ones first, to pass over the whole join only once
        subtotal = tables[0]
        for table in tables[1:-1]:
            subtotal = subtotal + table
        tables = [subtotal, tables[-1]]
    if tables[0].shape[0] * math.prod(shape) <= _AT_ONCE:
        joined = tables[0] + tables[1] if len(tables) == 2 else tables[0]
        least: Array = joined.min(axis=0)
        return least
    if len(tables) == 1:
        return np.asarray(tables[0].min(axis=0))
    out, buffer = np.full(shape, np.inf), np.empty(shape)
    for first, second in zip(*tables):
        np.add(first, second, out=buffer)
        np.minimum(out, buffer, out=out)
    return out


def aligned(table_scope: Scope, table: Array, scope: Scope) -> Array:
    """Return `table` with a dim for each variable of `scope`, of size 1 where it has none."""
    table = table.transpose([table_scope.index(v) for v in scope if v in table_scope])
    return table[tuple([slice(None) if v in table_scope else None for v in scope])]


def _diagonal(scope: Scope, table: Array) -> tuple[Scope, Array]:
    """Let a variable that stands twice in the scope take one value."""
    first, second = next(
        (i, j) for j in range(len(scope)) for i in range(j) if scope[i] == scope[j]
    )
    table = np.diagonal(table, axis1=first, axis2=second)  # the common dim comes last
    scope = (*(v for v in scope if v != scope[first]), scope[first])
    return (scope, table) if len(set(scope)) == len(scope) else _diagonal(scope, table)
