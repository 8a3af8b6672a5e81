"""A cluster as the places of a pipeline see it: their own devices, and links that all places share.

    line = PipelineLine("pp", stages=4, size=8)           # 4 places of 8 ranks each
    parts, kinds = ClusterPart.of(cluster, line).kinds(Mesh(dp=2, tp=4))

A place is where a stage stands: the ranks with one coordinate on the pipeline's axis. `kinds`
groups the places that have equal devices and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.cluster.cluster import Cluster
from autopar.cluster.links import Ranks
from autopar.cluster.machines import AxisLink, Device, Link
from autopar.mesh import Mesh


@dataclass(frozen=True)
class PipelineLine:
    """The places along the pipeline's axis, which all have `size` ranks."""

    axis: str
    stages: int
    size: int
    before: tuple[str, ...] = ()  # the axes that come before it in the mesh of all ranks
    outer: int = 1  # ranks along these

    @classmethod
    def of(cls, mesh: Mesh, axis: str) -> PipelineLine:
        """Return the line along an axis in a mesh of all ranks."""
        before = mesh.names[: mesh.names.index(axis)]
        return cls(axis, mesh[axis], mesh.size // mesh[axis], before, mesh.degree(before))

    def mesh(self, inner: Mesh) -> Mesh:
        """Return the mesh of all ranks; `inner`: that of each place, maybe with split axes."""
        first = [part for axis in self.before for part in inner.split_axes(axis)]
        rest = [axis for axis in inner if axis not in first]
        sizes = {**inner.sizes, self.axis: self.stages}
        return Mesh(**{axis: sizes[axis] for axis in (*first, self.axis, *rest)})

    @cached_property
    def ranks(self) -> list[Ranks]:
        """Return the ranks of each place, in the order of the mesh inside it."""
        every = np.arange(self.stages * self.size).reshape(self.outer, self.stages, -1)
        return list(every.transpose(1, 0, 2).reshape(self.stages, -1))

    def by_rank(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Return the value of each rank's place, from those of the places."""
        return np.tile(np.repeat(values, self.size // self.outer), self.outer)


@dataclass(frozen=True)
class ClusterPart(Cluster):
    """The cluster as seen from some places along a line."""

    line: PipelineLine = field(kw_only=True)
    places: tuple[int, ...] = field(kw_only=True)
    # None of these places is faster; else none is slower.
    is_best: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, whole: Cluster, line: PipelineLine) -> ClusterPart:
        """Return a part that is at least as fast as every place of the line."""
        part = cls(
            whole.nodes,
            whole.network,
            whole.name,
            whole.levels,
            whole.used,
            line=line,
            places=tuple(range(line.stages)),
            is_best=True,
        )
        vars(part)["_links"] = whole._links
        return part

    __hash__ = Cluster.__hash__

    def among(self, *places: int) -> ClusterPart:
        """Return a part that is at least as slow as each of these places."""
        part = replace(self, places=places, is_best=False)
        vars(part)["_links"] = self._links
        return part

    def kinds(self, mesh: Mesh) -> tuple[list[ClusterPart], list[int]]:
        """Return one part for each group of equal places, and each place's group number. `mesh` is
        that inside each place."""
        subsets = [
            axes for count in range(1, len(mesh.names) + 1) for axes in combinations(mesh, count)
        ]
        whole, axis = self.line.mesh(mesh), self.line.axis
        links = zip(*(self.place_links(whole, axes, axis) for axes in subsets))
        parts: dict[object, ClusterPart] = {}
        numbers: dict[object, int] = {}
        kind_of_place = []
        for place, links_of_place in enumerate(links):
            part = self.among(place)
            key = part.device, links_of_place
            parts.setdefault(key, part)
            kind_of_place.append(numbers.setdefault(key, len(numbers)))
        return list(parts.values()), kind_of_place

    @cached_property
    def device(self) -> Device:
        ranks = np.concatenate([self.line.ranks[place] for place in self.places])
        return self.strongest(ranks) if self.is_best else self.weakest(ranks)

    def group_link(self, mesh: Mesh, axes: Sequence[str]) -> AxisLink:
        links = self.place_links(self.line.mesh(mesh), axes, self.line.axis)
        distinct = dict.fromkeys(links[place] for place in self.places)
        return next(iter(distinct)) if len(distinct) == 1 else self._extreme(list(distinct))

    def _extreme(self, links: Sequence[AxisLink]) -> AxisLink:
        """Return the best or the worst link in each respect."""
        less, more = (min, max) if self.is_best else (max, min)
        widest = more(links, key=lambda link: link.bandwidth)
        kinds = {kind for link in links for kind, _ in link.link.measured}
        reached = {kind: [link.of(kind) for link in links] for kind in kinds}
        measured = {
            (kind, widest.size): (less(a for a, _ in all_), more(b for _, b in all_))
            for kind, all_ in reached.items()
        }
        link = Link(less(link.alpha for link in links), widest.bandwidth, measured)
        exchange = more(link.exchange_bandwidth for link in links)
        return AxisLink(widest.axis, widest.size, widest.level, link, exchange)
