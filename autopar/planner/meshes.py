"""Meshes: every way to arrange some devices in axes, the most promising first.

>>> [str(mesh) for mesh in meshes(8, 2)]
['Mesh(x=8)', 'Mesh(x=2, y=4)', 'Mesh(x=4, y=2)']

The last axis joins nearest neighbours, so the order of the sizes is also their placement on the
levels of links: of the orders whose axes all stay on a level, every one is kept; an axis that
would straddle a node's border unevenly is left out, where another arrangement has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cluster import Cluster
from autopar.mesh import Mesh

AXIS_NAMES = ("x", "y", "z", "w")


def meshes(devices: int, most_axes: int, cluster: Cluster | None = None) -> list[Mesh]:
    """All meshes of `devices` ranks with at most `most_axes` axes, fewest axes first."""
    if devices == 1:
        return [Mesh(x=1)]
    every = [sizes for sizes in _factorisations(devices) if len(sizes) <= most_axes]
    even = [sizes for sizes in every if cluster is None or _respects_nodes(sizes, cluster)]
    found = [Mesh(**dict(zip(AXIS_NAMES, sizes))) for sizes in even or every]
    return sorted(found, key=lambda mesh: len(mesh.names))


def _factorisations(number: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write `number` as a product of factors from 2."""
    yield (number,)
    for factor in range(2, number // 2 + 1):
        if number % factor == 0:
            for rest in _factorisations(number // factor):
                yield (factor, *rest)


def _respects_nodes(sizes: tuple[int, ...], cluster: Cluster) -> bool:
    """Whether each axis lies inside nodes or spans whole nodes."""
    per_node, stride = cluster.devices_per_node, 1
    for size in reversed(sizes):
        inside = per_node % (stride * size) == 0
        across = stride % per_node == 0 or ((stride * size) % per_node == 0 and stride == 1)
        if not (inside or across):
            return False
        stride *= size
    return True
