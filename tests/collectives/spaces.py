"""All layouts and states of a mesh, random values that live in them, and their inner product."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autopar.layout import Layout
from autopar.mesh import Mesh

Pending = tuple[str, ...]
Parts = tuple[tuple[int, int], ...]


def subsets(items: Sequence[str]) -> list[tuple[str, ...]]:
    return [
        some for count in range(len(items) + 1) for some in itertools.combinations(items, count)
    ]


def all_layouts(mesh: Mesh, ndim: int, parts: Parts = ()) -> list[Layout]:
    """Every layout of a tensor with `ndim` dims, the axes on a dim in every order, and those that
    cut dims in `parts`."""

    def grow(axes: Sequence[str], layout: Layout) -> Iterator[Layout]:
        if not axes:
            yield layout
            return
        axis, *rest = axes
        yield from grow(rest, layout)
        yield from grow(rest, layout.with_partial((*layout.partial, axis)))
        for dim, cut in enumerate(layout.dims):
            for at in range(len(cut) + 1):
                yield from grow(rest, layout.with_dim(dim, (*cut[:at], axis, *cut[at:])))

    found = list(grow(mesh.names, Layout.replicated(ndim)))
    return found + [
        layout.with_dim(dim, (f"/{number}", *layout.dims[dim]))
        for dim, number in parts
        for layout in found
        if len(layout.dims[dim]) == 1
    ]


def all_states(mesh: Mesh, ndim: int, parts: Parts = ()) -> list[tuple[Layout, Pending]]:
    """Every layout with every choice of pending axes among its replicas."""
    return [
        (layout, pending)
        for layout in all_layouts(mesh, ndim, parts)
        for pending in subsets([axis for axis in mesh.names if axis not in layout.axes])
    ]


def random_value(
    layout: Layout, shape: Sequence[int], mesh: Mesh, random: torch.Generator
) -> list[Tensor]:
    """One random tensor per rank, equal on ranks that hold replicas of each other."""
    drawn: dict[tuple[int, ...], Tensor] = {}
    values = []
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        key = tuple(place[axis] for axis in layout.axes)
        if key not in drawn:
            local = layout.local_shape(shape, mesh, rank)
            drawn[key] = torch.randn(local, generator=random, dtype=torch.float64)
        values.append(drawn[key].clone())
    return values


def gradient_layout(layout: Layout, pending: Pending) -> Layout:
    """The gradient of a replica is a replica, or a partial sum over its pending axes."""
    return layout.gradient.with_partial(pending)


def random_gradient(
    layout: Layout,
    pending: Pending,
    shape: Sequence[int],
    mesh: Mesh,
    random: torch.Generator,
) -> list[Tensor]:
    return random_value(gradient_layout(layout, pending), shape, mesh, random)


def are_replicas(values: Sequence[Tensor], layout: Layout, mesh: Mesh) -> bool:
    """Return whether ranks hold equal values wherever `layout` says that they hold replicas."""
    seen: dict[tuple[int, ...], Tensor] = {}
    for rank, value in enumerate(values):
        place = mesh.coordinate(rank)
        first = seen.setdefault(tuple(place[axis] for axis in layout.axes), value)
        if not torch.equal(first, value):
            return False
    return True


def inner(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    layout: Layout,
    pending: Pending,
    mesh: Mesh,
) -> float:
    """The inner product of a whole value with a whole gradient, from their pieces.

    Pieces of a cut add up. Over a partial sum the terms of the value meet one gradient, over a
    pending axis one value meets the terms of the gradient: both add up. Replicas count once.
    """
    once = [axis for axis in mesh.names if axis not in layout.axes and axis not in pending]
    return math.fsum(
        (values[rank].detach() * gradients[rank]).sum().item()
        for rank in range(mesh.size)
        if all(mesh.coordinate(rank)[axis] == 0 for axis in once)
    )
