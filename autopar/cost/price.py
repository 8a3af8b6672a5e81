"""ClusterPrice: what movements cost on the links of a cluster, by the formulas of `model`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autopar.cluster import AxisLink, Cluster
from autopar.cost.model import collective_seconds
from autopar.mesh import Mesh


@dataclass(frozen=True)
class ClusterPrice:
    """The price of collectives over axes of `mesh` when its ranks are those of `cluster`."""

    cluster: Cluster
    mesh: Mesh

    def link(self, axes: tuple[str, ...]) -> AxisLink:
        """What a group over `axes` has between its members."""
        return _link(self.cluster, self.mesh, tuple(sorted(axes, key=self.mesh.names.index)))

    def seconds(self, kind: str, axes: tuple[str, ...], size: Any) -> Any:
        """Seconds of one collective with `size` bytes on the rank that holds most; arrays too."""
        return collective_seconds(kind, self.link(axes), size)


@lru_cache(maxsize=4096)
def _link(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...]) -> AxisLink:
    return cluster.group_link(mesh, axes)
