"""Cluster: the machines. Nodes of devices, and the links inside a node and between nodes.

>>> from autopar.mesh import Mesh
>>> cluster = Cluster.preset("dgx-h100", nodes=2)
>>> cluster.devices, cluster.device.name
(16, 'H100 SXM 80 GB')
>>> links = cluster.axis_links(Mesh(dp=2, tp=8))
>>> links["tp"].level, links["dp"].level
('inside', 'between')

The eight `tp` groups of one node share its way out, so that each `dp` group gets an eighth:

>>> links["tp"].bandwidth / 1e9, links["dp"].bandwidth / 1e9
(450.0, 50.0)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from autopar.cluster.calibration import local_node
from autopar.cluster.cluster_file import cluster_text, read_cluster
from autopar.cluster.gpus import local_gpus
from autopar.cluster.machines import AxisLink, Device, Host, Link, Node
from autopar.cluster.pace import Pace, kept_pace, paced
from autopar.cluster.presets import preset
from autopar.errors import InvalidInput, written
from autopar.mesh import Mesh
from autopar.schema import MOST, Count, is_count
from autopar.units import scaled


@dataclass(frozen=True)
class EqualNodes(Node):
    """Equal nodes, one after another."""

    count: Count


@dataclass(frozen=True)
class ClusterForm:
    """A cluster in a plan's file."""

    name: str
    network: Link
    nodes: tuple[EqualNodes, ...]


@dataclass(frozen=True)
class Cluster:
    """Ranks are numbered node after node. `network.bandwidth` is of each node, all its ways out."""

    FORM: ClassVar = ClusterForm

    nodes: tuple[Node, ...]
    network: Link
    name: str = "cluster"

    def __post_init__(self) -> None:
        if not self.nodes or min(node.devices for node in self.nodes) < 1:
            raise InvalidInput(
                "a cluster has at least one node, and each node at least one device",
                got=f"nodes with {[node.devices for node in self.nodes]} devices",
                remedy='Cluster.preset("dgx-h100", nodes=2)',
            )
        if self.devices > MOST:
            raise InvalidInput(
                f"a cluster has at most {MOST} devices",
                got=f"{self.devices} devices in {len(self.nodes)} nodes",
                remedy="plan for a part of it",
            )

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Cluster:
        """A known machine by name: dgx-a100, dgx-h100, dgx-v100, h200, piz-daint."""
        node, network = preset(name)
        if not is_count(nodes) or nodes * node.devices > MOST:
            raise InvalidInput(
                f"a cluster has a whole number of nodes, and at most {MOST} devices",
                got=f"{name} with {nodes!r} nodes of {node.devices}",
                remedy="nodes=16",
            )
        return cls((node,) * nodes, network, name)

    @classmethod
    def local(cls, devices: int, measure: bool = True) -> Cluster:
        """This machine. Its GPUs, if it has some: of a kind known by name, or measured.

        Else processes as devices, measured once (seconds), then kept in a file. More devices than
        the machine has GPUs are those of several such machines; under torchrun, it knows how many
        ranks of a machine share them. What `autopar calibrate` found of so many devices is kept to;
        `measure=False` leaves all of it out.
        """
        if not is_count(devices):
            raise InvalidInput(
                "a cluster has a whole number of devices, at least 1",
                got=f"Cluster.local({devices!r})",
                remedy="Cluster.local(8)",
            )
        if torch.cuda.is_available():
            made = cls(*local_gpus(devices), "local")
        else:
            node = local_node(devices, measure)
            made = cls((node,), node.link, "local")
        return made.at(kept_pace(made.device.name, devices)) if measure else made

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file; see `autopar.cluster.cluster_file` for what it may hold."""
        return read_cluster(Path(path), cls)

    def save(self, path: str | Path) -> None:
        """Write the TOML file that `load` reads."""
        written(path, cluster_text(self.name, self._runs(), self.network), "a cluster file")

    def at(self, pace: Pace) -> Cluster:
        """The same machines, all of whose work takes so many times as long."""
        nodes = tuple(paced(node, pace) for node in self.nodes)
        return replace(self, nodes=nodes, network=pace.link(self.network))

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return sum(node.devices for node in self.nodes)

    @property
    def devices_per_node(self) -> int:
        """Of the smallest node."""
        return min(node.devices for node in self.nodes)

    @property
    def device(self) -> Device:
        """The device all work in lock step waits for: the weakest in each respect."""
        return self.weakest(range(self.devices))

    def weakest(self, ranks: Iterable[int]) -> Device:
        """The weakest in each respect of the devices of `ranks`."""
        node_of = self._node_of()
        kinds = list(dict.fromkeys(self.nodes[node_of[rank]].device for rank in ranks))
        return kinds[0] if len(kinds) == 1 else Device.weakest(kinds)

    def axis_links(self, mesh: Mesh) -> dict[str, AxisLink]:
        """For each axis of `mesh`, what its groups have between their members."""
        return {axis: self.group_link(mesh, (axis,)) for axis in mesh}

    def group_link(self, mesh: Mesh, axes: Sequence[str]) -> AxisLink:
        """What a group over several axes together has between its members."""
        if mesh.size > self.devices:
            raise InvalidInput(
                "a mesh has at most as many ranks as the cluster has devices",
                got=f"{mesh}: {mesh.size} ranks on {self.devices} devices",
                remedy="make the mesh smaller or add nodes",
            )
        own = [mesh.names.index(axis) for axis in axes]
        other = [i for i in range(len(mesh.names)) if i not in own]
        ranks = np.arange(mesh.size).reshape(mesh.shape).transpose(other + own)
        ranks = ranks.reshape(-1, math.prod(mesh.shape[i] for i in own))
        return self._link_of_groups("*".join(axes), ranks)

    def _node_of(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.nodes)), [node.devices for node in self.nodes])

    def _link_of_groups(self, name: str, groups: np.ndarray) -> AxisLink:
        nodes = self._node_of()[groups]  # groups x members
        used = [self.nodes[i].link for i in np.unique(nodes)]
        slowest = min(used, key=lambda link: link.bandwidth)
        inside = replace(slowest, alpha=max(link.alpha for link in used))
        size = groups.shape[1]
        crossing = nodes[(nodes != nodes[:, :1]).any(axis=1)]
        if not len(crossing):
            return AxisLink(name, size, "inside", inside, inside.bandwidth)
        # A ring leaves each of its nodes once; the rings that leave one node share its way out.
        rings = np.zeros(len(self.nodes), int)
        outward = np.zeros(len(self.nodes))  # members x the part of the group that is elsewhere
        for group in crossing:
            present, members = np.unique(group, return_counts=True)
            rings[present] += 1
            outward[present] += members * (size - members) / size
        ring = min(inside.bandwidth, self.network.bandwidth / rings.max())
        exchange = self.network.bandwidth / outward.max() * (size - 1) / size
        link = replace(
            self.network, alpha=max(self.network.alpha, inside.alpha), bandwidth=float(ring)
        )
        return AxisLink(name, size, "between", link, min(float(exchange), inside.bandwidth))

    def to_form(self) -> ClusterForm:
        runs = (EqualNodes(n.device, n.devices, n.link, count) for n, count in self._runs())
        return ClusterForm(self.name, self.network, tuple(runs))

    @classmethod
    def of_form(cls, form: ClusterForm) -> Cluster:
        runs = ((Node(run.device, run.devices, run.link),) * run.count for run in form.nodes)
        return cls(tuple(itertools.chain(*runs)), form.network, form.name)

    def _runs(self) -> list[tuple[Node, int]]:
        return [(node, len(list(run))) for node, run in itertools.groupby(self.nodes)]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.devices} devices in {len(self.nodes)} nodes"]
        for node, count in self._runs():
            device = node.device
            rates = ", ".join(f"{t} {scaled(rate, 'FLOP/s')}" for t, rate in device.flops.items())
            lines += [
                f"  {count} x {node.devices} {device.name}: {scaled(device.memory, 'B')} "
                f"at {scaled(device.bandwidth, 'B/s')}",
                f"      {rates}; {device.efficiency:.0%} of it reached",
                f"      inside:  {_link_text(node.link)} for each device",
                f"      host:    {_host_text(device.host)} for each device",
            ]
        if len(self.nodes) > 1:
            lines.append(f"  between: {_link_text(self.network)} for each node")
        return "\n".join(lines)


def _host_text(host: Host) -> str:
    copies = f"{scaled(host.copy_bandwidth, 'B/s')}, {host.copy_alpha * 1e6:.3g} µs"
    return f"{scaled(host.memory, 'B')}{', its own memory' * host.is_device}, {copies}"


def _link_text(link: Link) -> str:
    return f"{scaled(link.bandwidth, 'B/s')}, {link.alpha * 1e6:.3g} µs"
