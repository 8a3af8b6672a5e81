"""Reshard table: the least seconds from every layout to every other, as one matrix.

>>> table = reshard_table(Mesh(dp=2, tp=2), 2)
>>> seconds = table.seconds((8, 8), ReshardTerms(4, price))    # a row and a column a state
>>> seconds[table.index[Placement(source)], table.index[Placement(target, pending)]]

`redistribute` finds the shortest movements for one pair. This table has the seconds for all pairs,
by relaxing the same steps at the same prices until nothing changes. A pending state cannot become
another: its row is infinite but for itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.collectives import Price
from autopar.collectives.redistribution import FREE, TIE, local_elements, possible_movements
from autopar.layout import Layout, Parts, Placement
from autopar.mesh import Mesh

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
# Sources; and for each order of dims, states and those sources that they are with it.
_Orbits = tuple[Numbers, list[tuple[Numbers, Numbers, Numbers]]]

_AT_ONCE = 64  # sources


class Placements(tuple[Placement, ...]):
    """Hold placements in order. Equal ones are one object, so that tables are found by them."""

    __slots__ = ()
    _known: ClassVar[dict[tuple[Placement, ...], Placements]] = {}
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    def __new__(cls, given: Iterable[Placement]) -> Placements:
        key = tuple(given)
        if key not in cls._known:
            cls._known.setdefault(key, super().__new__(cls, key))
        return cls._known[key]


def reshard_table(mesh: Mesh, ndim: int, parts: Parts = ()) -> ReshardTable:
    """Return the table for tensors of `ndim` dims on `mesh`, which may be cut in `parts`.
    Tables of meshes with many axes are large, so fewer of them are kept."""
    return (_small if len(mesh.names) < 3 else _large)(mesh, ndim, parts)


@lru_cache(maxsize=256)
def _small(mesh: Mesh, ndim: int, parts: Parts) -> ReshardTable:
    return ReshardTable(mesh, ndim, parts)


@lru_cache(maxsize=32)
def _large(mesh: Mesh, ndim: int, parts: Parts) -> ReshardTable:
    return ReshardTable(mesh, ndim, parts)


class ReshardTerms(NamedTuple):
    """Hold what the seconds between layouts depend on, besides the shape."""

    itemsize: int
    price: Price
    differentiable: bool = True
    learns: bool = True  # the seconds include those of the gradient's way back
    frozen: tuple[str, ...] = ()  # axes over which nothing moves


class ReshardTable:
    """Hold all states of tensors with some number of dims, and all steps between them."""

    def __init__(self, mesh: Mesh, ndim: int, parts: Parts = ()) -> None:
        self.mesh, self.ndim, self.parts = mesh, ndim, parts
        self.starts = tuple(dict.fromkeys(self._starts()))
        states = list(self.starts)
        self.index = {state: number for number, state in enumerate(states)}
        by_kind: dict[tuple[str, str, tuple[str, ...]], list[tuple[int, int, int]]]
        by_kind = defaultdict(list)
        evenly: dict[tuple[tuple[int, int], ...], int] = {}  # dims that must be cut evenly
        for state in states:  # grows while it is walked
            for movement, after, cuts in possible_movements(state, mesh, parts):
                if after not in self.index:
                    self.index[after] = len(states)
                    states.append(after)
                entry = (self.index[state], self.index[after], evenly.setdefault(cuts, len(evenly)))
                by_kind[movement.kind, movement.backward, movement.axes].append(entry)
        self.states, self._evenly = states, list(evenly)
        self._kinds = [(kind, len(entries)) for kind, entries in by_kind.items()]
        all_entries = [entry for entries in by_kind.values() for entry in entries]
        self._before, self._after, self._cuts = np.array(all_entries, np.int64).reshape(-1, 3).T
        self._order = np.argsort(self._after, kind="stable")
        self._solved: dict[tuple, Array] = {}
        self._places: dict[tuple[int, ...], tuple[Numbers, Numbers]] = {}
        self._known: dict[tuple[int, ...], _Orbits] = {}
        self._exchanged: dict[tuple[int, ...], Numbers] = {}

    def _starts(self) -> list[Placement]:
        """Return every layout whose axes stand in the order of the mesh."""
        states: list[Placement] = []
        choices = ["whole", "partial", *range(self.ndim)]
        for choice in itertools.product(choices, repeat=len(self.mesh.names)):
            dims: list[tuple[str, ...]] = [() for _ in range(self.ndim)]
            partial = []
            for axis, target in zip(self.mesh.names, choice):
                if target == "partial":
                    partial.append(axis)
                elif isinstance(target, int):
                    dims[target] += (axis,)
            # A dim that is cut may be cut in parts.
            variants = [
                [cut, *((f"/{number}", *cut) for at, number in self.parts if cut and at == dim)]
                for dim, cut in enumerate(dims)
            ]
            for variant in itertools.product(*variants):
                states.append(Placement(Layout(*variant, partial=partial)))
        return states

    @cached_property
    def pending(self) -> NDArray[np.bool_]:
        """Return a flag for each state: whether it is pending on some axis."""
        return np.array([bool(state.pending) for state in self.states])

    @cached_property
    def data(self) -> Numbers:
        """Return a number for each state, equal if they hold the same data, pending or not."""
        numbers: dict[Layout, int] = {}
        return np.array([numbers.setdefault(s.layout, len(numbers)) for s in self.states])

    def rows(self, states: Iterable[Placement]) -> Numbers:
        """Return the numbers of some states."""
        return np.array([self.index[state] for state in states], np.int64)

    @lru_cache(maxsize=4096)  # noqa: B019 (tables live as long as their mesh is planned)
    def elements(self, shape: tuple[int, ...]) -> Array:
        """Return the number of elements of the largest piece in each state."""
        return np.array(
            [local_elements(state.dims, shape, self.mesh) for state in self.states], np.float64
        )

    def seconds(self, shape: tuple[int, ...], terms: ReshardTerms) -> Array:
        """Return the least seconds from each state to each state, forward and backward."""
        terms = terms._replace(learns=terms.learns and terms.differentiable)
        # Tensors that may be in parts differ by more than their size.
        total_bytes = float(np.prod(shape, dtype=np.float64) * terms.itemsize)
        uneven_sizes = [size if self.parts or size % self.mesh.size else 0 for size in shape]
        key = total_bytes, *uneven_sizes, terms
        if key not in self._solved:
            dims = tuple(
                sorted((d for d in range(self.ndim) if shape[d] > 1), key=shape.__getitem__)
            )
            if not any(uneven_sizes) or self.parts or dims == tuple(range(self.ndim)):
                self._solved[key] = self._solve(shape, terms)
            else:  # the order of the dims says nothing, nor does a dim of one element
                smaller = reshard_table(self.mesh, len(dims))
                seconds = smaller.seconds(tuple(shape[dim] for dim in dims), terms)
                self._solved[key] = self._spread(seconds, dims)
        return self._solved[key]

    def _spread(self, seconds: Array, dims: tuple[int, ...]) -> Array:
        """Return the table of a tensor with only `dims`, in this order, for all states."""
        if dims not in self._places:
            index = reshard_table(self.mesh, len(dims)).index
            pairs: list[tuple[int, int]] = []
            for number, state in enumerate(self.states):
                if not any(axes for dim, axes in enumerate(state.dims) if dim not in dims):
                    layout = Layout(*(state.dims[dim] for dim in dims), partial=state.partial)
                    pairs.append((number, index[Placement(layout, state.pending)]))
            rows, smaller_rows = np.array(pairs, np.int64).T
            self._places[dims] = rows, smaller_rows
        rows, smaller_rows = self._places[dims]
        spread = np.full((len(self.states), len(self.states)), np.inf)
        np.fill_diagonal(spread, 0.0)
        spread[np.ix_(rows, rows)] = seconds[np.ix_(smaller_rows, smaller_rows)]
        return spread

    def _solve(self, shape: tuple[int, ...], terms: ReshardTerms) -> Array:
        """Relax the steps that begin where something got nearer, from some of the states."""
        cost, order = self._steps(shape, terms), self._order
        possible = order[np.isfinite(cost[order])]
        before, after, cost = self._before[possible], self._after[possible], cost[possible, None]
        sources, orbits = self._orbits(self._alike(shape))
        least = np.full((len(self.states), len(sources)), np.inf)  # to each state, from each source
        for at in range(0, len(sources), _AT_ONCE):
            block = least[:, at : at + _AT_ONCE]
            frontier = sources[at : at + _AT_ONCE]
            block[frontier, np.arange(len(frontier))] = 0.0
            while len(frontier):
                in_frontier = np.zeros(len(block), bool)
                in_frontier[frontier] = True
                used = np.flatnonzero(in_frontier[before])
                if not len(used):
                    break
                starts = np.flatnonzero(np.diff(after[used], prepend=-1))
                shorter = np.minimum.reduceat(block[before[used]] + cost[used], starts)
                targets = after[used[starts]]
                current = block[targets]
                frontier = targets[(shorter < current).any(axis=1)]
                block[targets] = np.minimum(shorter, current)
        seconds = np.full((len(self.states), len(self.states)), np.inf)
        np.fill_diagonal(seconds, 0.0)
        rows = np.ascontiguousarray(least.T)
        for exchanged, ours, theirs in orbits:
            seconds[ours] = rows[theirs[:, None], exchanged]
        return seconds

    def _alike(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a number for each dim: dims of equal numbers may change places at no cost."""
        if self.parts:
            return tuple(range(self.ndim))
        return tuple(size if size % self.mesh.size else 0 for size in shape)

    def _orbits(self, alike: tuple[int, ...]) -> _Orbits:
        """Return the states to start from, and how the rows of all others follow from theirs."""
        if alike not in self._known:
            places = {kind: [d for d, k in enumerate(alike) if k == kind] for kind in alike}
            sources: dict[int, int] = {}
            members: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
            for number in np.flatnonzero(~self.pending).tolist():
                dims = self.states[number].dims
                order = list(range(self.ndim))  # to each dim, which one comes there
                for where in places.values():
                    for to, dim in zip(where, sorted(where, key=dims.__getitem__)):
                        order[to] = dim
                first = self._moved(tuple(order))[number]
                place = sources.setdefault(int(first), len(sources))
                members[tuple(order)].append((number, place))
            orbits = [
                (self._moved(order), *np.array(pairs, np.int64).T)
                for order, pairs in members.items()
            ]
            self._known[alike] = np.array([*sources], np.int64), orbits
        return self._known[alike]

    def _moved(self, order: tuple[int, ...]) -> Numbers:
        """Return for each state the one with its dims in this order."""
        if order not in self._exchanged:
            numbers = []
            for state in self.states:
                layout = Layout(*[state.dims[dim] for dim in order], partial=state.partial)
                numbers.append(self.index[Placement(layout, state.pending)])
            self._exchanged[order] = np.array(numbers, np.int64)
        return self._exchanged[order]

    def _steps(self, shape: tuple[int, ...], terms: ReshardTerms) -> Array:
        """Return the seconds of every single step; infinite if it cannot be."""
        size = self.elements(shape) * terms.itemsize
        larger = np.maximum(size[self._before], size[self._after])
        cost = np.full(len(larger), TIE)
        start = 0
        for (kind, backward, axes), count in self._kinds:
            rows = slice(start, start + count)
            start += count
            if (kind == "identity" and not terms.differentiable) or set(axes) & set(terms.frozen):
                cost[rows] = np.inf
                continue
            for direction in (kind, backward) if terms.learns else (kind,):
                if direction not in FREE:
                    cost[rows] += terms.price.seconds(direction, axes, larger[rows])
        even = [all(shape[dim] % degree == 0 for dim, degree in cuts) for cuts in self._evenly]
        return np.where(np.array(even, bool)[self._cuts], cost, np.inf)
