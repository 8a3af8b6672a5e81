"""ReshardTable: the least seconds from every layout to every other, as one matrix.

>>> table = reshard_table(Mesh(dp=2, tp=2), 2)
>>> seconds = table.seconds((8, 8), 4, price)          # one row and one column for each state
>>> seconds[table.index[Placement(source)], table.index[Placement(target, pending)]]

What `redistribute` finds for one pair is found here for all at once, by relaxing all steps until
nothing changes: the states, the steps between them and their prices are the same. From a pending
state nothing else can be had: the row of one is infinite but for itself.
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
    """Placements in their order. Equal ones are one object, so that tables are found by them."""

    __slots__ = ()
    _known: ClassVar[dict[tuple[Placement, ...], Placements]] = {}
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    def __new__(cls, given: Iterable[Placement]) -> Placements:
        key = tuple(given)
        if key not in cls._known:
            cls._known.setdefault(key, super().__new__(cls, key))
        return cls._known[key]


def reshard_table(mesh: Mesh, ndim: int, parts: Parts = ()) -> ReshardTable:
    """The table for tensors of `ndim` dims on `mesh`, which may be cut in `parts`. Those of meshes
    with many axes are large."""
    return (_small if len(mesh.names) < 3 else _large)(mesh, ndim, parts)


@lru_cache(maxsize=256)
def _small(mesh: Mesh, ndim: int, parts: Parts) -> ReshardTable:
    return ReshardTable(mesh, ndim, parts)


@lru_cache(maxsize=32)
def _large(mesh: Mesh, ndim: int, parts: Parts) -> ReshardTable:
    return ReshardTable(mesh, ndim, parts)


class _Terms(NamedTuple):
    """What the seconds between layouts depend on, besides the shape."""

    itemsize: int
    price: Price
    differentiable: bool
    learns: bool
    frozen: tuple[str, ...]


class ReshardTable:
    """All states of tensors of some number of dims, and all steps between them."""

    def __init__(self, mesh: Mesh, ndim: int, parts: Parts = ()) -> None:
        self.mesh, self.ndim, self.parts = mesh, ndim, parts
        self.starts = tuple(dict.fromkeys(self._starts()))
        found = list(self.starts)
        self.index = {state: number for number, state in enumerate(found)}
        grouped: dict[tuple[str, str, tuple[str, ...]], list[tuple[int, int, int]]]
        grouped = defaultdict(list)
        evenly: dict[tuple[tuple[int, int], ...], int] = {}  # dims that must be cut evenly
        for state in found:  # grows while it is walked
            for movement, after, cuts in possible_movements(state, mesh, parts):
                if after not in self.index:
                    self.index[after] = len(found)
                    found.append(after)
                entry = self.index[state], self.index[after], evenly.setdefault(cuts, len(evenly))
                grouped[movement.kind, movement.backward, movement.axes].append(entry)
        self.states, self._evenly = found, list(evenly)
        self._kinds = [(kind, len(entries)) for kind, entries in grouped.items()]
        joined = [entry for entries in grouped.values() for entry in entries]
        self._before, self._after, self._cuts = np.array(joined, np.int64).reshape(-1, 3).T
        self._order = np.argsort(self._after, kind="stable")
        self._solved: dict[tuple, Array] = {}
        self._places: dict[tuple[int, ...], tuple[Numbers, Numbers]] = {}
        self._known: dict[tuple[int, ...], _Orbits] = {}
        self._exchanged: dict[tuple[int, ...], Numbers] = {}

    def _starts(self) -> list[Placement]:
        """Every layout whose axes stand in the order of the mesh."""
        states: list[Placement] = []
        choices = ["whole", "partial", *range(self.ndim)]
        for choice in itertools.product(choices, repeat=len(self.mesh.names)):
            dims: list[tuple[str, ...]] = [() for _ in range(self.ndim)]
            partial = []
            for axis, where in zip(self.mesh.names, choice):
                if where == "partial":
                    partial.append(axis)
                elif isinstance(where, int):
                    dims[where] += (axis,)
            # A dim that is cut may be cut in parts.
            ways = [
                [cut, *((f"/{number}", *cut) for at, number in self.parts if cut and at == dim)]
                for dim, cut in enumerate(dims)
            ]
            for way in itertools.product(*ways):
                states.append(Placement(Layout(*way, partial=partial)))
        return states

    @cached_property
    def pending(self) -> NDArray[np.bool_]:
        """Which states are pending on some axis."""
        return np.array([bool(state.pending) for state in self.states])

    @cached_property
    def data(self) -> Numbers:
        """States with the same number hold the same data: pending or not is no difference."""
        numbers: dict[Layout, int] = {}
        return np.array([numbers.setdefault(s.layout, len(numbers)) for s in self.states])

    def rows(self, states: Iterable[Placement]) -> Numbers:
        """The numbers of some states."""
        return np.array([self.index[state] for state in states], np.int64)

    @lru_cache(maxsize=4096)  # noqa: B019 (tables live as long as their mesh is planned)
    def elements(self, shape: tuple[int, ...]) -> Array:
        """How many elements the largest piece has, in each state."""
        return np.array(
            [local_elements(state.dims, shape, self.mesh) for state in self.states], np.float64
        )

    def seconds(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        price: Price,
        differentiable: bool = True,
        learns: bool = True,
        frozen: tuple[str, ...] = (),
    ) -> Array:
        """The least seconds, forward and (if it `learns`) backward, from each state to each state.

        No movement goes over the axes that are `frozen`."""
        # What may be in parts is told apart by more than its size.
        whole = float(np.prod(shape, dtype=np.float64) * itemsize)
        odd = [size if self.parts or size % self.mesh.size else 0 for size in shape]
        terms = _Terms(itemsize, price, differentiable, learns and differentiable, frozen)
        key = whole, *odd, terms
        if key not in self._solved:
            dims = tuple(
                sorted((d for d in range(self.ndim) if shape[d] > 1), key=shape.__getitem__)
            )
            if not any(odd) or self.parts or dims == tuple(range(self.ndim)):
                self._solved[key] = self._solve(shape, terms)
            else:  # the order of the dims says nothing, nor does a dim of one element
                smaller = reshard_table(self.mesh, len(dims))
                seconds = smaller.seconds(tuple(shape[dim] for dim in dims), *terms)
                self._solved[key] = self._spread(seconds, dims)
        return self._solved[key]

    def _spread(self, seconds: Array, dims: tuple[int, ...]) -> Array:
        """The table of a tensor that has only `dims`, in this order, as a table of these states."""
        if dims not in self._places:
            index = reshard_table(self.mesh, len(dims)).index
            kept: list[tuple[int, int]] = []
            for number, state in enumerate(self.states):
                if not any(axes for dim, axes in enumerate(state.dims) if dim not in dims):
                    same = Layout(*(state.dims[dim] for dim in dims), partial=state.partial)
                    kept.append((number, index[Placement(same, state.pending)]))
            own, other = np.array(kept, np.int64).T
            self._places[dims] = own, other
        own, other = self._places[dims]
        spread = np.full((len(self.states), len(self.states)), np.inf)
        np.fill_diagonal(spread, 0.0)
        spread[np.ix_(own, own)] = seconds[np.ix_(other, other)]
        return spread

    def _solve(self, shape: tuple[int, ...], terms: _Terms) -> Array:
        """By relaxing the steps that begin where something got nearer, from some of the states."""
        cost, order = self._steps(shape, terms), self._order
        possible = order[np.isfinite(cost[order])]
        before, after, cost = self._before[possible], self._after[possible], cost[possible, None]
        sources, same = self._orbits(self._alike(shape))
        found = np.full((len(self.states), len(sources)), np.inf)  # to each state, from each source
        for at in range(0, len(sources), _AT_ONCE):
            part = found[:, at : at + _AT_ONCE]
            near = sources[at : at + _AT_ONCE]
            part[near, np.arange(len(near))] = 0.0
            while len(near):
                is_near = np.zeros(len(part), bool)
                is_near[near] = True
                use = np.flatnonzero(is_near[before])
                if not len(use):
                    break
                starts = np.flatnonzero(np.diff(after[use], prepend=-1))
                shorter = np.minimum.reduceat(part[before[use]] + cost[use], starts)
                targets = after[use[starts]]
                known = part[targets]
                near = targets[(shorter < known).any(axis=1)]
                part[targets] = np.minimum(shorter, known)
        seconds = np.full((len(self.states), len(self.states)), np.inf)
        np.fill_diagonal(seconds, 0.0)
        rows = np.ascontiguousarray(found.T)
        for exchanged, ours, theirs in same:
            seconds[ours] = rows[theirs[:, None], exchanged]
        return seconds

    def _alike(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A number for each dim: where two are equal, the dims may change places at no cost."""
        if self.parts:
            return tuple(range(self.ndim))
        return tuple(size if size % self.mesh.size else 0 for size in shape)

    def _orbits(self, alike: tuple[int, ...]) -> _Orbits:
        """States to go from, and how from them follow the ways from all that are not pending."""
        if alike not in self._known:
            places = {kind: [d for d, k in enumerate(alike) if k == kind] for kind in alike}
            firsts: dict[int, int] = {}
            members: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
            for number in np.flatnonzero(~self.pending).tolist():
                dims = self.states[number].dims
                moved = list(range(self.ndim))  # to each dim, which one comes there
                for where in places.values():
                    for to, dim in zip(where, sorted(where, key=dims.__getitem__)):
                        moved[to] = dim
                first = self._moved(tuple(moved))[number]
                place = firsts.setdefault(int(first), len(firsts))
                members[tuple(moved)].append((number, place))
            same = [
                (self._moved(moved), *np.array(pairs, np.int64).T)
                for moved, pairs in members.items()
            ]
            self._known[alike] = np.array([*firsts], np.int64), same
        return self._known[alike]

    def _moved(self, order: tuple[int, ...]) -> Numbers:
        """Of each state, the one with its dims in this order."""
        if order not in self._exchanged:
            found = []
            for state in self.states:
                layout = Layout(*[state.dims[dim] for dim in order], partial=state.partial)
                found.append(self.index[Placement(layout, state.pending)])
            self._exchanged[order] = np.array(found, np.int64)
        return self._exchanged[order]

    def _steps(self, shape: tuple[int, ...], terms: _Terms) -> Array:
        """What every single step takes; infinite where it cannot be."""
        size = self.elements(shape) * terms.itemsize
        larger = np.maximum(size[self._before], size[self._after])
        cost = np.full(len(larger), TIE)
        at = 0
        for (kind, backward, axes), count in self._kinds:
            part = slice(at, at + count)
            at += count
            if (kind == "identity" and not terms.differentiable) or set(axes) & set(terms.frozen):
                cost[part] = np.inf
                continue
            for each in (kind, backward) if terms.learns else (kind,):
                if each not in FREE:
                    cost[part] += terms.price.seconds(each, axes, larger[part])
        even = [all(shape[dim] % degree == 0 for dim, degree in cuts) for cuts in self._evenly]
        return np.where(np.array(even, bool)[self._cuts], cost, np.inf)
