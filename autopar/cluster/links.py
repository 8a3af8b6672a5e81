"""Links: the bandwidth of groups of ranks, where all groups are busy at once.

Ranks stand in nodes, nodes in racks, and so on: units, each with links out that its ranks share. A
ring leaves each of its units once, however many members it has there, and rings that leave one unit
share its links. In a unit with rails, a ring uses at most one rail for each member.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cluster.machines import AxisLink, Level, Link, Node
from autopar.mesh import Mesh

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class MessageLink:
    """The link of a message between two ranks, whose rank sends one message after another."""

    alpha: float
    bandwidth: float
    is_inside: bool  # of a node: by links of their own


@dataclass(frozen=True)
class _Tier:
    """Equal units of ranks (nodes, or groups of nodes) with their links out."""

    level: str
    link: Link  # the ways out of a unit together
    nodes: int  # in a unit
    unit_of: Ranks  # by rank
    rail: NDArray[np.float64]  # by unit, what one rank may send

    @cached_property
    def count(self) -> int:
        return len(self.rail)


class ClusterLinks:
    """The links of a cluster; `used` devices of each node take ranks."""

    def __init__(
        self, nodes: Sequence[Node], used: Sequence[int], network: Link, levels: Sequence[Level]
    ) -> None:
        self._nodes = nodes
        self.node_of: Ranks = np.repeat(np.arange(len(nodes)), used)
        rails = np.array([network.bandwidth / node.rails for node in nodes])
        self._tiers = [_Tier("between", network, 1, self.node_of, rails)]
        for level in levels:
            link = Link(level.alpha, level.bandwidth)
            count = -(-len(nodes) // level.nodes)
            unit_of = self.node_of // level.nodes
            whole = np.full(count, level.bandwidth)
            self._tiers.append(_Tier(level.name, link, level.nodes, unit_of, whole))
        self._tiers = [tier for tier in self._tiers if tier.count > 1]
        self._is_even = len({*used}) == 1 and all(node == nodes[0] for node in nodes)
        self._known: dict[tuple[object, ...], tuple[AxisLink, ...]] = {}

    def of_axes(
        self, mesh: Mesh, axes: Sequence[str], along: str | None = None
    ) -> tuple[AxisLink, ...]:
        """Return the link of groups over `axes`, for each place along an axis (None: one place)."""
        key = mesh, tuple(axes), along
        if key not in self._known:
            self._known[key] = self._even(mesh, axes, along) or self._of_axes(mesh, axes, along)
        return self._known[key]

    def _of_axes(self, mesh: Mesh, axes: Sequence[str], along: str | None) -> tuple[AxisLink, ...]:
        inner = [mesh.names.index(axis) for axis in axes]
        outer = [] if along is None else [mesh.names.index(along)]
        other = [i for i in range(len(mesh.names)) if i not in inner + outer]
        ranks = np.arange(mesh.size).reshape(mesh.shape).transpose(outer + other + inner)
        groups = ranks.reshape(-1, math.prod(mesh.shape[i] for i in inner))
        places = mesh[along] if along is not None else 1
        place_of = np.repeat(np.arange(places), len(groups) // places)
        return self.of_groups("*".join(axes), groups, place_of)

    def of_groups(self, name: str, groups: Ranks, place_of: Ranks) -> tuple[AxisLink, ...]:
        """Return the link of the slowest group of each place, when all these groups are busy."""
        count, size = int(place_of.max()) + 1, groups.shape[1]
        alpha, ring = np.zeros(count), np.full(count, np.inf)
        nodes = self.node_of[groups]
        used = np.unique(place_of[:, None] * len(self._nodes) + nodes)
        insides: list[Link] = [self._nodes[0].link] * count
        for place, node in zip(*(each.tolist() for each in divmod(used, len(self._nodes)))):
            link = self._nodes[node].link
            alpha[place] = max(alpha[place], link.alpha)
            if link.bandwidth < ring[place]:
                ring[place], insides[place] = link.bandwidth, link
        exchange, widest = ring.copy(), [self._inside] * count
        for tier in self._tiers:
            crossing, row, unit, members = _crossings(tier.unit_of[groups])
            if not len(crossing):
                break
            places = place_of[row]
            rings = np.bincount(unit, minlength=tier.count)
            outward = np.bincount(unit, members * (size - members) / size, tier.count)
            share = np.minimum(tier.link.bandwidth / rings[unit], members * tier.rail[unit])
            np.minimum.at(ring, places, share)
            # Of what a member holds, that part leaves the unit which is for those elsewhere.
            sent_elsewhere = (size - 1) / size
            share = np.minimum(
                tier.link.bandwidth / outward[unit] * sent_elsewhere,
                tier.rail[unit] * (size - 1) / (size - members),
            )
            np.minimum.at(exchange, places, share)
            for place in np.unique(place_of[crossing]).tolist():
                alpha[place] = max(alpha[place], tier.link.alpha)
                widest[place] = tier
        links = []
        for place, (inside, tier) in enumerate(zip(insides, widest)):
            link = inside if tier is self._inside else tier.link
            link = replace(link, alpha=float(alpha[place]), bandwidth=float(ring[place]))
            links.append(AxisLink(name, size, tier.level, link, float(exchange[place])))
        return tuple(links)

    @cached_property
    def _inside(self) -> _Tier:
        """Return the tier of groups that leave no node."""
        return _Tier("inside", self._nodes[0].link, 1, self.node_of, np.zeros(0))

    def _even(
        self, mesh: Mesh, axes: Sequence[str], along: str | None
    ) -> tuple[AxisLink, ...] | None:
        """Return `_of_axes` for equal nodes that each hold a grid of the mesh, from one group
        instead of thousands. Return None for any other cluster."""
        if not self._is_even:
            return None
        node, size = self._nodes[0], mesh.degree(axes)
        link, level = node.link, "inside"
        ring = exchange = link.bandwidth
        for tier in self._tiers:
            ranks = len(self.node_of) // len(self._nodes) * tier.nodes
            if mesh.size <= ranks:
                break
            members = _members_among(mesh, axes, ranks)
            if members is None:
                return None
            if members == size:
                break
            rail, bandwidth = float(tier.rail[0]), tier.link.bandwidth
            ring = min(ring, bandwidth * members / ranks, rail * members)
            elsewhere = (size - 1) / (size - members)
            exchange = min(exchange, bandwidth / ranks * elsewhere, rail * elsewhere)
            link = replace(tier.link, alpha=max(link.alpha, tier.link.alpha))
            level = tier.level
        link = replace(link, bandwidth=ring)
        axis_link = AxisLink("*".join(axes), size, level, link, exchange)
        return (axis_link,) * (1 if along is None else mesh[along])

    def of_messages(
        self, ranks: Sequence[Ranks], pairs: Iterable[tuple[int, int]]
    ) -> Mapping[tuple[int, int], MessageLink]:
        """Return the link of messages between pairs of places, from each rank to the rank with the
        same number. `ranks` lists those of each place. All places send at once."""
        pairs = tuple(dict.fromkeys(pairs))
        shares = []
        for tier in self._tiers:
            leaving = np.zeros(len(self.node_of), bool)
            for sender, receiver in pairs:
                sending, receiving = tier.unit_of[ranks[sender]], tier.unit_of[ranks[receiver]]
                leaving[ranks[sender][sending != receiving]] = True
            flows = np.bincount(tier.unit_of[leaving], minlength=tier.count)
            shares.append(np.minimum(tier.link.bandwidth / np.maximum(flows, 1), tier.rail))
        links_of_pairs = {}
        for sender, receiver in pairs:
            nodes = {*self.node_of[ranks[sender]].tolist(), *self.node_of[ranks[receiver]].tolist()}
            links = [self._nodes[node].link for node in nodes]
            alpha = max(link.alpha for link in links)
            bandwidth, is_inside = min(link.bandwidth for link in links), True
            for tier, share in zip(self._tiers, shares):
                sending, receiving = tier.unit_of[ranks[sender]], tier.unit_of[ranks[receiver]]
                crossing = sending != receiving
                if crossing.any():
                    alpha, is_inside = max(alpha, tier.link.alpha), False
                    # What comes in is as much as goes out: it is answered on the way back.
                    bandwidth = min(
                        bandwidth, share[sending[crossing]].min(), share[receiving[crossing]].min()
                    )
            links_of_pairs[sender, receiver] = MessageLink(alpha, float(bandwidth), is_inside)
        return links_of_pairs


class _Crossings(NamedTuple):
    groups: Ranks  # with members in several units
    rows: Ranks  # these groups, once for each of their units
    units: Ranks  # for each row
    members: Ranks  # of the group in this unit, for each row


def _crossings(units: Ranks) -> _Crossings:
    """Return the groups with members in several units, and the units that each of these has."""
    crossing = np.flatnonzero((units != units[:, :1]).any(axis=1))
    count = int(units.max()) + 1
    keys, members = np.unique(crossing[:, None] * count + units[crossing], return_counts=True)
    return _Crossings(crossing, keys // count, keys % count, members)


def _members_among(mesh: Mesh, axes: Sequence[str], ranks: int) -> int | None:
    """Return how many members of a group over `axes` are among the first `ranks` ranks; None where
    these are no grid of the mesh."""
    members, stride = 1, 1
    for name, size in zip(reversed(mesh.names), reversed(mesh.shape)):
        inside = size
        if stride * size > ranks:
            inside = max(1, ranks // stride)
            if stride < ranks and (ranks % stride or (stride * size) % ranks):
                return None
        members *= inside if name in axes else 1
        stride *= size
    return members
