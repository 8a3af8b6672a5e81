"""Moves: the least seconds from every layout to every other, as one matrix.

>>> table = moves(Mesh(dp=2, tp=2), 2)
>>> seconds = table.seconds((8, 8), 4, price)          # one row and one column for each state
>>> seconds[table.index[state_of(source)], table.index[state_of(target, pending)]]

What `redistribute` finds for one pair, Floyd and Warshall's algorithm finds here for all: the
states, the steps between them and their prices are the same.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.collectives import Price
from autopar.collectives.redistribution import TIE, State, local_elements, steps
from autopar.layout import Layout
from autopar.mesh import Mesh

Array = NDArray[np.float64]


def state_of(layout: Layout, pending: Collection[str] = ()) -> State:
    """A layout, and the axes on which its gradient arrives as a partial sum."""
    return layout.dims, layout.partial, tuple(sorted(pending))


@lru_cache(maxsize=64)
def moves(mesh: Mesh, ndim: int) -> Moves:
    """The table for tensors of `ndim` dims on `mesh`."""
    return Moves(mesh, ndim)


class Moves:
    """All states of tensors of some number of dims, and all steps between them."""

    def __init__(self, mesh: Mesh, ndim: int) -> None:
        self.mesh, self.ndim = mesh, ndim
        found = list(dict.fromkeys(self._starts()))
        self.index = {state: number for number, state in enumerate(found)}
        # (kind, backward, axes) -> from, to; and the dims that must be even, if any
        grouped: dict[tuple[str, str, tuple[str, ...]], list[tuple[int, int, tuple]]]
        grouped = defaultdict(list)
        for state in found:  # grows while it is walked
            for movement, after, cuts in steps(state, mesh):
                if after not in self.index:
                    self.index[after] = len(found)
                    found.append(after)
                key = (movement.kind, movement.backward, movement.axes)
                grouped[key].append((self.index[state], self.index[after], cuts))
        self.states = found
        self._grouped = grouped
        self._solved: dict[tuple, Array] = {}

    def _starts(self) -> list[State]:
        """Every layout whose axes stand in the order of the mesh."""
        states = []
        choices = ["whole", "partial", *range(self.ndim)]
        for choice in itertools.product(choices, repeat=len(self.mesh.names)):
            dims: list[tuple[str, ...]] = [() for _ in range(self.ndim)]
            partial = []
            for axis, where in zip(self.mesh.names, choice):
                if where == "partial":
                    partial.append(axis)
                elif isinstance(where, int):
                    dims[where] += (axis,)
            states.append((tuple(dims), tuple(sorted(partial)), ()))
        return states

    @cached_property
    def pending(self) -> NDArray[np.bool_]:
        """Which states are pending on some axis."""
        return np.array([bool(state[2]) for state in self.states])

    @cached_property
    def data(self) -> NDArray[np.int64]:
        """States with the same number hold the same data: pending or not is no difference."""
        numbers: dict[tuple, int] = {}
        return np.array([numbers.setdefault(s[:2], len(numbers)) for s in self.states])

    @lru_cache(maxsize=4096)  # noqa: B019 (tables live as long as their mesh is planned)
    def elements(self, shape: tuple[int, ...]) -> Array:
        """How many elements the largest piece has, in each state."""
        return np.array(
            [local_elements(state[0], shape, self.mesh) for state in self.states], np.float64
        )

    def seconds(
        self, shape: tuple[int, ...], itemsize: int, price: Price, differentiable: bool = True
    ) -> Array:
        """The least seconds, forward and backward, from each state to each state."""
        even = all(size % self.mesh.size == 0 for size in shape)
        whole = float(np.prod(shape, dtype=np.float64) * itemsize)
        key = (whole if even else shape, itemsize, price, differentiable)
        if key not in self._solved:
            self._solved[key] = self._solve(shape, itemsize, price, differentiable)
        return self._solved[key]

    def _solve(
        self, shape: tuple[int, ...], itemsize: int, price: Price, differentiable: bool
    ) -> Array:
        count = len(self.states)
        seconds = np.full((count, count), np.inf)
        np.fill_diagonal(seconds, 0.0)
        size = self.elements(shape) * itemsize
        for (kind, backward, axes), entries in self._grouped.items():
            if kind == "identity" and not differentiable:
                continue
            kept = [
                (before, after)
                for before, after, cuts in entries
                if all(shape[dim] % degree == 0 for dim, degree in cuts)
            ]
            if not kept:
                continue
            before, after = np.array(kept).T
            larger = np.maximum(size[before], size[after])
            cost = np.full(len(kept), TIE)
            if kind not in ("identity", "slice"):
                cost = cost + price.seconds(kind, axes, larger)
            if differentiable and backward not in ("identity", "slice"):
                cost = cost + price.seconds(backward, axes, larger)
            seconds[before, after] = np.minimum(seconds[before, after], cost)
        for middle in range(count):
            through = seconds[:, middle]
            rows = np.flatnonzero(np.isfinite(through))
            if len(rows):
                block = through[rows, None] + seconds[None, middle]
                seconds[rows] = np.minimum(seconds[rows], block)
        return seconds


