"""ClusterPrice: seconds of movements on the links of a cluster, by the formulas of `rooflines`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autopar.cluster import AxisLink, Cluster
from autopar.cost.rooflines import collective_seconds
from autopar.mesh import Mesh


@dataclass(frozen=True)
class ClusterPrice:
    """The price of collectives over axes of `mesh` when its ranks are those of `cluster`."""

    cluster: Cluster
    mesh: Mesh
    buffer_bytes: int  # of what travels together

    @cached_property
    def _hash(self) -> int:
        return hash((self.cluster, self.mesh, self.buffer_bytes))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _links(self) -> dict[tuple[str, ...], AxisLink]:
        return {}

    def link(self, axes: tuple[str, ...]) -> AxisLink:
        """Return the link between the members of a group over `axes`."""
        if axes not in self._links:
            ordered = tuple(sorted(axes, key=self.mesh.names.index))
            self._links[axes] = self.cluster.group_link(self.mesh, ordered)
        return self._links[axes]

    def seconds(self, kind: str, axes: tuple[str, ...], size: Any) -> Any:
        """Return the seconds of a collective; `size`: bytes on the fullest rank, or an array."""
        return collective_seconds(kind, self.link(axes), size)

    def bucketed(self, axes: tuple[str, ...], size: Any, kind: str = "all_reduce") -> Any:
        """Return the seconds of a collective as part of a bucket, which shares the latency: `size`
        is the bytes of a gradient, for example."""
        whole, latency = (self.seconds(kind, axes, x) for x in (size, 0.0 * size))
        return whole - latency * np.maximum(0.0, 1.0 - size / self.buffer_bytes)
