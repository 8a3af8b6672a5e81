"""Nested groups: the neighbours in a group of ranks that share a node, a rack, and so on.

States of parameters that are cut over such neighbours alone are gathered over fast links.

>>> cluster = Cluster.preset("dgx-a100", nodes=4)
>>> nested_group_sizes(cluster, Mesh(dp=16, tp=2), ["dp"])
(4, 16)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.cluster.cluster import Cluster
from autopar.mesh import Mesh


def nested_group_sizes(cluster: Cluster, mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of neighbours in a group over `axes` that share a unit of links.

    One number for each level on which several do, smaller units first, and last that of the whole
    group. Each divides the next. `mesh` is that of all ranks.
    """
    inner = [index for index, axis in enumerate(mesh.names) if axis in axes]
    outer = [index for index in range(len(mesh.names)) if index not in inner]
    ranks = np.arange(mesh.size).reshape(mesh.shape).transpose(outer + inner)
    size = math.prod(mesh.shape[index] for index in inner)
    nodes = cluster.node_of[ranks.reshape(-1, size)]
    sizes = [size]
    for count in (level.nodes for level in reversed(cluster.levels)):
        sizes.append(_neighbours(nodes // count, sizes[-1]))
    sizes.append(_neighbours(nodes, sizes[-1]))
    return tuple(sorted({*sizes} - {1})) or (1,)


def _neighbours(units: np.ndarray, most: int) -> int:
    """Return the largest divisor of `most` of which so many neighbours are always in one unit."""
    for count in range(most, 1, -1):
        if most % count == 0:
            neighbours = units.reshape(-1, count)
            if (neighbours == neighbours[:, :1]).all():
                return count
    return 1
