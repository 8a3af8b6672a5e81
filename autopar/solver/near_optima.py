"""Near optima: all choices whose weight is close to the least, with the memory of each.

>>> elimination = Elimination({0: 2, 1: 2})
>>> elimination.add((0,), np.array([0.0, 1.0]))
>>> elimination.add((1,), np.array([0.0, 3.0]))
>>> elimination.run()
>>> memory = [((0,), np.array([8.0, 2.0])), ((1,), np.array([8.0, 2.0]))]
>>> rows = near_optima(elimination, memory, Nearness(most=2.0, multiplier=0.1))
>>> rows.excess.tolist(), rows.memory.tolist()  # of strategies 1 and 0, and of 0 and 0
([1.0, 0.0], [10.0, 16.0])

The excess of a choice is its weight (cost + multiplier · memory) less the least weight. It is the
sum of what each eliminated node costs above its best, given its neighbours: none of these terms is
negative. Few strategies are part of a choice of little excess, and those are put together again,
node after node. Of rows that agree in what other nodes see of them, one that costs more and needs
no less memory than another is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.solver.elimination import Elimination, Scope
from autopar.solver.packed_graph import Array, Integers

ROUNDED = 1e-12  # relative to an excess: sums of floating-point numbers do not tell less apart
_MOST_ROWS = 1 << 17  # that are looked at together


class TooManyRows(Exception):
    """Signal that there are too many near optima to list them."""


@dataclass(frozen=True)
class Nearness:
    """Say which choices are listed: those of at most `most` excess under a multiplier."""

    most: float
    multiplier: float

    @property
    def rounded(self) -> float:
        """Return the cost that dropping a row may lose."""
        return self.most * ROUNDED


@dataclass(frozen=True)
class ChoiceRows:
    """Hold choices of some variables: `values` of each in a row, with excess and bytes."""

    variables: tuple[int, ...]
    values: Integers
    excess: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.excess)

    def at(self, places: Integers) -> ChoiceRows:
        """Return some of the rows."""
        return ChoiceRows(
            self.variables, self.values[places], self.excess[places], self.memory[places]
        )

    def keys(self, scope: Iterable[int], sizes: Mapping[int, int]) -> Integers:
        """Return a number for the strategies of the variables in `scope`, the first in rows."""
        numbers = np.zeros(len(self), np.int64)
        for v in scope:
            numbers = numbers * sizes[v] + self.values[:, self.variables.index(v)]
        return numbers

    @classmethod
    def together(cls, listed: Sequence[ChoiceRows]) -> ChoiceRows:
        """Return all rows of some lists over the same variables."""
        return cls(
            listed[0].variables,
            np.concatenate([rows.values for rows in listed]),
            np.concatenate([rows.excess for rows in listed]),
            np.concatenate([rows.memory for rows in listed]),
        )

    @classmethod
    def of_places(cls, scope: Scope, places: Integers, sizes: Mapping[int, int]) -> ChoiceRows:
        """Return rows for `places` in a flat table over `scope`, without excess and bytes."""
        values = np.zeros((len(places), len(scope)), np.int64)
        if scope:
            values[:] = np.stack(np.unravel_index(places, [sizes[v] for v in scope]), axis=1)
        return cls(scope, values, np.zeros(len(places)), np.zeros(len(places)))


class Ends(NamedTuple):
    """Hold the rows of variables that stay, and the excess of what is best beside each row."""

    rows: ChoiceRows
    others: Array


def near_optima(
    elimination: Elimination,
    memory: Iterable[tuple[Scope, Array]],
    near: Nearness,
    given: Iterable[tuple[Scope, ChoiceRows]] = (),
    ends: Ends | None = None,
) -> ChoiceRows:
    """Return the near optima of a sum of tables that was eliminated to the end.

    `memory` has the bytes of some scopes. Rows that are `given` tell what one of the tables, over
    that scope, is made of. Each row of `ends`, whose variables were eliminated last, is completed;
    their own tables then are no part of any excess."""
    sizes = elimination.sizes
    rows, others = ends or Ends(ChoiceRows.of_places((), np.zeros(1, np.int64), sizes), np.zeros(1))
    place = {v: at for at, (v, _) in enumerate(elimination.trail) if v not in rows.variables}
    bytes_: dict[int, list[tuple[Scope, Array]]] = {}
    waiting: dict[int, list[tuple[Scope, ChoiceRows]]] = {}
    last = len(place)  # stands for the rows that remain

    def first_of(scope: Scope) -> int:
        return min((place.get(v, last) for v in scope), default=last)

    for scope, table in memory:
        opened = tuple(v for v in scope if sizes[v] > 1)
        reshaped = table.reshape([sizes[v] for v in opened])
        bytes_.setdefault(first_of(opened), []).append((opened, reshaped))
    for scope, known in given:
        opened = tuple(dict.fromkeys(v for v in scope if sizes[v] > 1))
        waiting.setdefault(first_of(opened), []).append((opened, known))

    def complete(rows: ChoiceRows, others: Array, at: int) -> ChoiceRows:
        """Add to rows all that waits for them."""
        added = sum((_taken(rows, part, table) for part, table in bytes_.pop(at, ())), rows.memory)
        rows = ChoiceRows(rows.variables, rows.values, rows.excess, added)
        for on, other in waiting.pop(at, ()):
            rows, others = joined(rows, others, other, on, near=near, sizes=sizes)
        return rows

    for near_scope in reversed([*_near_scopes(elimination, near)]):
        scope, alone, rest = near_scope
        v, neighbours = scope[0], scope[1:]
        if v in place:
            alone = complete(alone, rest, place[v])
            alone = undominated(alone, alone.keys(neighbours, sizes), near)
            waiting.setdefault(first_of(neighbours), []).append((neighbours, alone))
    rows = complete(rows, others, last)
    return undominated(rows, rows.keys(ends.rows.variables if ends else (), sizes), near)


class _NearScope(NamedTuple):
    scope: Scope  # a variable and those that it had as neighbours
    rows: ChoiceRows  # with the excess of the variable alone
    others: Array  # the least excess of all other variables beside a row


def _near_scopes(elimination: Elimination, near: Nearness) -> Iterator[_NearScope]:
    """Yield for each variable, the last first, what choices of little excess have there."""
    best = elimination.constant
    for scope, total in elimination.totals():
        if total.size > _MOST_ROWS << 6:
            raise TooManyRows
        places = np.flatnonzero(total.reshape(-1) - best <= near.most)
        if len(places) > _MOST_ROWS:
            raise TooManyRows
        rows = ChoiceRows.of_places(scope, places, elimination.sizes)
        least = np.broadcast_to(total.min(axis=0), total.shape).reshape(-1)[places]
        alone = total.reshape(-1)[places] - least
        others = total.reshape(-1)[places] - best - alone
        yield _NearScope(scope, ChoiceRows(scope, rows.values, alone, rows.memory), others)


def joined(
    rows: ChoiceRows,
    others: Array,
    other: ChoiceRows,
    on: Scope,
    *,
    near: Nearness,
    sizes: Mapping[int, int],
) -> tuple[ChoiceRows, Array]:
    """Return all pairs of rows that agree in the variables `on`, of so little excess together.
    `others`: the excess of what is best beside each of `rows`."""
    keys, other_keys = rows.keys(on, sizes), other.keys(on, sizes)
    order = np.argsort(other_keys, kind="stable")
    left, right = matches(keys, other_keys[order])
    right = order[right]
    excess = rows.excess[left] + other.excess[right]
    near_enough = excess + others[left] <= near.most
    left, right, excess = left[near_enough], right[near_enough], excess[near_enough]
    new = [place for place, v in enumerate(other.variables) if v not in rows.variables]
    values = np.concatenate([rows.values[left], other.values[right][:, new]], axis=1)
    variables = (*rows.variables, *(other.variables[place] for place in new))
    memory = rows.memory[left] + other.memory[right]
    return ChoiceRows(variables, values, excess, memory), others[left]


def matches(keys: Integers, ordered: Integers) -> tuple[Integers, Integers]:
    """Return the places of all pairs of equal keys, the second in order."""
    first = np.searchsorted(ordered, keys, "left")
    counts = np.searchsorted(ordered, keys, "right") - first
    if counts.sum() > _MOST_ROWS:
        raise TooManyRows
    left = np.repeat(np.arange(len(keys)), counts)
    offsets = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    return left, first[left] + offsets


def undominated(rows: ChoiceRows, keys: Integers, near: Nearness, width: float = 0.0) -> ChoiceRows:
    """Return the rows that none with an equal key betters in cost and memory, by the key.
    One that costs up to `width` more than another, and needs no more memory, may stand for it."""
    cost = rows.excess - near.multiplier * rows.memory
    steps = np.floor((cost - cost.min(initial=0.0)) / max(width, near.rounded, 1e-300))
    order = np.lexsort((cost, rows.memory, keys))
    ranks = np.unique(steps, return_inverse=True)[1][order].astype(np.int64)
    ordered = keys[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    group = np.cumsum(is_first)
    ranks -= group * (len(order) + 1)  # so that the least of a group is below all before
    least = np.minimum.accumulate(ranks)
    is_kept = is_first.copy()
    is_kept[1:] |= ranks[1:] < least[:-1]
    return rows.at(order[is_kept])


def _taken(rows: ChoiceRows, scope: Scope, table: Array) -> Array:
    """Return the entry of a table over `scope` for each row."""
    columns = tuple(rows.values[:, rows.variables.index(v)] for v in scope)
    return np.asarray(table[columns]) if scope else np.full(len(rows), float(table))
