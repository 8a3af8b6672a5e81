"""The cheapest path from one layout to another: a sequence of movements.

>>> mesh, source, target = Mesh(a=2, b=2), Layout(("a", "b"), None), Placement(Layout(None, "a"))
>>> for movement in redistribute(source, target, (8, 8), 4, mesh, LinkPrice.uniform(mesh)):
...     print(movement.kind, movement.axes, movement.dim, movement.to_dim)
all_gather ('b',) 0 None
all_to_all ('a',) 0 1

The path is found by Dijkstra's algorithm over placements; an edge is one collective, priced forward
and backward. Inner axes of a dim leave it before outer ones, and new axes enter it innermost.
Several axes move at once where their pieces are even and stand in the order of the mesh. A search
is kept for its source: the next target continues where the last one stopped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Protocol

from autopar.cluster.collective_counts import latency_count, volume_count
from autopar.collectives.movement import Movement
from autopar.errors import InvalidInput, VerifierError
from autopar.layout import Layout, Parts, Placement, axes_of, parts_of
from autopar.mesh import Mesh

# A movement more costs at least this: of two equal ways, the one with fewer movements is taken.
TIE = 1e-15  # seconds
FREE = ("identity", "first_term", "slice")  # kinds that move no data


class Price(Protocol):
    """The price of collectives in seconds; hashable, and equal ones are interchangeable."""

    def seconds(self, kind: str, axes: tuple[str, ...], size: Any) -> Any:
        """Return the seconds of one collective; `size`: bytes of the larger of a rank's tensors
        before and after it.

        Only kinds that move data are priced: an identity and a slice cost nothing.
        """
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class LinkPrice:
    """Latency and bandwidth of each mesh axis; a group over several goes at the slowest's pace.

    Latencies and bytes count as in `cluster/collective_counts.py`; of an all-to-all they are those
    of one rank's piece.
    """

    mesh: Mesh
    alpha: tuple[float, ...]  # seconds, one for each axis of the mesh
    beta: tuple[float, ...]  # seconds per byte

    @classmethod
    def uniform(cls, mesh: Mesh, alpha: float = 5e-6, beta: float = 1e-11) -> LinkPrice:
        """Return a price with equal links on every axis."""
        return cls(mesh, (alpha,) * len(mesh.names), (beta,) * len(mesh.names))

    @classmethod
    def of(cls, mesh: Mesh, alpha: Mapping[str, float], beta: Mapping[str, float]) -> LinkPrice:
        """Return a price with links by the name of the axis."""
        names = mesh.names
        return cls(mesh, tuple(alpha[n] for n in names), tuple(beta[n] for n in names))

    def seconds(self, kind: str, axes: tuple[str, ...], size: Any) -> Any:
        parts = self.mesh.degree(axes)
        places = [self.mesh.names.index(axis) for axis in axes]
        alpha, beta = max(self.alpha[i] for i in places), max(self.beta[i] for i in places)
        return volume_count(kind, parts) * size * beta + latency_count(kind, parts) * alpha


def redistribute(
    source: Layout,
    target: Placement,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    price: Price,
    differentiable: bool = True,
    learns: bool = True,
) -> tuple[Movement, ...]:
    """Return the cheapest movements from `source` to `target`.

    Without `differentiable` only forward counts, and the target's pending axes are ignored. Without
    `learns` the path has a backward that never runs and costs nothing.
    """
    learns = learns and differentiable
    return _solve(source, target, tuple(shape), itemsize, mesh, price, differentiable, learns)[0]


def redistribution_cost(
    source: Layout,
    target: Placement,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    price: Price,
    differentiable: bool = True,
    learns: bool = True,
) -> float:
    """Return the seconds that the movements of `redistribute` take, forward and backward."""
    learns = learns and differentiable
    return _solve(source, target, tuple(shape), itemsize, mesh, price, differentiable, learns)[1]


def apply_path(path: Iterable[Movement], source: Layout) -> Placement:
    """Return the placement to which a path leads."""
    end = Placement(source)
    for movement in path:
        end = movement.place(end)
    return end


def verify_path(path: Iterable[Movement], source: Layout, target: Placement) -> None:
    """Refuse a path that does not lead from `source` to `target`."""
    path = tuple(path)
    end = apply_path(path, source)
    if end is not target:
        raise VerifierError(
            "the movements of a redistribution lead from its source to its target",
            got=f"{path} from {source} leads to {end}; wanted {target}",
        )


def movement_cost(
    movement: Movement,
    layout: Layout,
    shape: Sequence[int],
    itemsize: float,
    mesh: Mesh,
    price: Price,
    *,
    learns: bool = True,
) -> float:
    """Return the seconds of one movement from `layout`, forward and, if it `learns`, backward."""
    size = moved_bytes(movement, layout, shape, itemsize, mesh)
    return _edge_cost(movement, size, price, learns=learns)


def moved_bytes(
    movement: Movement, layout: Layout, shape: Sequence[int], itemsize: float, mesh: Mesh
) -> float:
    """Return the larger of the bytes that one rank holds before and after a movement."""
    after = movement.apply(layout)
    return itemsize * max(
        math.prod(layout.largest_shape(shape, mesh)), math.prod(after.largest_shape(shape, mesh))
    )


def _edge_cost(movement: Movement, size: float, price: Price, *, learns: bool) -> float:
    kinds = (movement.kind, movement.backward) if learns else (movement.kind,)
    return sum(
        (price.seconds(kind, movement.axes, size) for kind in kinds if kind not in FREE), 0.0
    )


@lru_cache(maxsize=1 << 18)
def _solve(
    source: Layout,
    target: Placement,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    price: Price,
    differentiable: bool,
    learns: bool,
) -> tuple[tuple[Movement, ...], float]:
    if Placement(source) is target:
        return (), 0.0
    _validate(source, target, shape, mesh)
    even, size = shape, float(itemsize)
    parts = tuple(sorted({*source.parts, *target.layout.parts}))
    if not parts and all(length % mesh.size == 0 for length in shape):
        # Every cut is even: only the bytes count, so that shapes of one size share a search.
        even = (mesh.size,) * len(shape)
        size = itemsize * math.prod(shape) / math.prod(even)
    search = _search(source, even, size, mesh, price, differentiable, learns, parts)
    return search.reach(target)


def _validate(source: Layout, target: Placement, shape: tuple[int, ...], mesh: Mesh) -> None:
    source.validate(shape, mesh)
    target.layout.validate(shape, mesh)
    if not set(target.partial) <= set(source.partial):
        raise InvalidInput(
            "no movement makes a partial sum: only an operator on cut data gives one",
            got=f"from {source} to {target}",
            remedy=f"leave {sorted(set(target.partial) - set(source.partial))} out of the target",
        )
    if unknown := sorted(set(target.pending) - set(mesh.names)):
        raise InvalidInput(
            "a gradient is a partial sum only over axes on which the value is a replica",
            got=f"{target} on {mesh}",
            remedy=f"leave {unknown} out",
        )


@dataclass(eq=False)
class _Search:
    """Dijkstra's algorithm from one source, continued as far as each target needs."""

    source: Layout
    shape: tuple[int, ...]
    itemsize: float
    mesh: Mesh
    price: Price
    differentiable: bool
    learns: bool
    parts: Parts = ()

    def __post_init__(self) -> None:
        self.start = Placement(self.source)
        self.best: dict[Placement, float] = {self.start: 0.0}
        self.came: dict[Placement, tuple[Placement, Movement, float]] = {}
        self.settled: set[Placement] = set()
        self.order = itertools.count()
        self.open: list[tuple[float, int, Placement]] = [(0.0, 0, self.start)]
        self.costs: dict[tuple[str, bool, tuple[str, ...], float], float] = {}
        self.sizes: dict[tuple[tuple[str, ...], ...], float] = {}

    def reach(self, target: Placement) -> tuple[tuple[Movement, ...], float]:
        """Return the path to `target`, and its seconds."""
        if not self.differentiable:
            target = Placement(target.layout)
        while target not in self.settled:
            distance, _, placement = heappop(self.open)
            if placement not in self.settled:
                self.settled.add(placement)
                self._expand(placement, distance)
        path: list[Movement] = []
        seconds = 0.0
        while target != self.start:
            target, movement, cost = self.came[target]
            path.append(movement)
            seconds += cost
        return tuple(reversed(path)), seconds

    def _expand(self, placement: Placement, distance: float) -> None:
        before = self._bytes(placement.dims)
        for movement, after, cuts in possible_movements(placement, self.mesh, self.parts):
            if after in self.settled or (movement.pending and not self.differentiable):
                continue
            if any(self.shape[dim] % degree for dim, degree in cuts):
                continue
            size = max(before, self._bytes(after.dims))
            cost = self._cost(movement, size)
            total = distance + cost + TIE
            if total < self.best.get(after, math.inf):
                self.best[after] = total
                self.came[after] = (placement, movement, cost)
                heappush(self.open, (total, next(self.order), after))

    def _cost(self, movement: Movement, size: float) -> float:
        key = (movement.kind, movement.pending, movement.axes, size)
        if key not in self.costs:
            self.costs[key] = _edge_cost(movement, size, self.price, learns=self.learns)
        return self.costs[key]

    def _bytes(self, dims: tuple[tuple[str, ...], ...]) -> float:
        """Return the bytes of the largest piece."""
        if dims not in self.sizes:
            self.sizes[dims] = local_elements(dims, self.shape, self.mesh) * self.itemsize
        return self.sizes[dims]


_search = lru_cache(maxsize=512)(_Search)


@lru_cache(maxsize=1 << 16)
def local_elements(dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], mesh: Mesh) -> int:
    """Return the number of elements of the largest piece."""
    return math.prod(Layout(*dims).largest_shape(shape, mesh))


# A movement, where it leads, and the dims that must be cut evenly for it, each with its degree:
# over several axes at once the pieces are those of the axes one by one only where all are even.
PossibleMovement = tuple[Movement, Placement, tuple[tuple[int, int], ...]]


@lru_cache(maxsize=1 << 16)
def possible_movements(
    placement: Placement, mesh: Mesh, parts: Parts = ()
) -> tuple[PossibleMovement, ...]:
    """Return every single collective that is possible; `parts` of dims may be cut."""
    possible = []
    for movement in _movements(placement, mesh, parts):
        after, even_cuts = movement.place(placement), []
        if len(movement.axes) > 1 or movement.parts:
            for dim in {movement.dim, movement.to_dim} - {None}:
                assert dim is not None
                longer = max(placement.dims[dim], after.dims[dim], key=len)
                even_cuts.append((dim, (parts_of(longer) or 1) * mesh.degree(axes_of(longer))))
        possible.append((movement, after, tuple(even_cuts)))
    return tuple(possible)


def _movements(placement: Placement, mesh: Mesh, parts: Parts) -> Iterator[Movement]:
    def possible_parts(dim: int) -> list[Parts]:
        """Return the ways in which a dim may be cut (further): whole, or in parts."""
        if cut := placement.dims[dim]:
            return [_in_parts(dim, cut)]
        return [(), *((part,) for part in parts if part[0] == dim)]

    used = {*placement.layout.axes, *placement.pending}
    sums = _subsets(axis for axis in mesh.names if axis in placement.partial)
    free = _subsets(axis for axis in mesh.names if axis not in used)
    for axes in sums:
        yield Movement("all_reduce", axes)
        yield Movement("all_reduce", axes, pending=True)
    for axes in free:
        yield Movement("identity", axes, pending=True)
    for dim, cut in enumerate(placement.dims):
        for dim_parts in possible_parts(dim):
            for axes in sums:
                yield Movement("reduce_scatter", axes, dim, parts=dim_parts)
            for axes in free:
                yield Movement("slice", axes, dim, parts=dim_parts)
        dim_parts = _in_parts(dim, cut)
        for axes in _innermost(axes_of(cut), mesh):
            yield Movement("all_gather", axes, dim, parts=dim_parts)
            yield Movement("all_gather", axes, dim, pending=True, parts=dim_parts)
            for to_dim in range(placement.layout.ndim):
                for other in possible_parts(to_dim) if to_dim != dim else ():
                    both = tuple(sorted((*dim_parts, *other)))
                    yield Movement("all_to_all", axes, dim, to_dim, parts=both)


def _in_parts(dim: int, cut: tuple[str, ...]) -> Parts:
    count = parts_of(cut)
    return ((dim, count),) if count else ()


def _subsets(axes: Iterable[str]) -> list[tuple[str, ...]]:
    """Return all non-empty subsets of axes, each in the order of the mesh."""
    axes = tuple(axes)
    return [
        subset for count in range(len(axes)) for subset in itertools.combinations(axes, count + 1)
    ]


def _innermost(cut: tuple[str, ...], mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Yield the suffixes of `cut` that are in the order of the mesh."""
    for at in reversed(range(len(cut))):
        if at + 1 < len(cut) and mesh.names.index(cut[at]) > mesh.names.index(cut[at + 1]):
            return
        yield cut[at:]
