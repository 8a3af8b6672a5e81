"""Cluster: nodes of devices, the links inside a node and between nodes.

>>> from autopar.mesh import Mesh
>>> cluster = Cluster.preset("dgx-h100", nodes=2)
>>> cluster.devices, cluster.device.name
(16, 'H100 SXM 80 GB')
>>> links = cluster.axis_links(Mesh(dp=2, tp=8))
>>> links["tp"].level, links["dp"].level
('inside', 'between')

The eight `tp` groups of one node share its way out, so that each `dp` group gets an eighth:

>>> links["tp"].bandwidth / 1e9, links["dp"].bandwidth / 1e9
(370.0, 46.25)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.base.files import write_file
from autopar.base.schema import MOST, Count, Index, is_count
from autopar.cluster.calibration import local_node
from autopar.cluster.cluster_file import cluster_text, read_cluster
from autopar.cluster.gpus import local_gpus
from autopar.cluster.links import ClusterLinks, MessageLink, Ranks
from autopar.cluster.machines import AxisLink, Device, Host, HostLoad, Level, Link, Node
from autopar.cluster.pace import Pace, cached_pace, node_at_pace
from autopar.cluster.presets import preset
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.text.tables import wrap_line
from autopar.text.units import counted, plural, scaled


@dataclass(frozen=True)
class EqualNodes(Node):
    """A run of equal nodes in a cluster's file."""

    count: Count = field(kw_only=True)


@dataclass(frozen=True)
class ClusterForm:
    """A cluster as it is written in a plan's file."""

    name: str
    network: Link
    nodes: tuple[EqualNodes, ...]
    levels: tuple[Level, ...] = ()
    used: tuple[Index, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """The machines of a training run; ranks are numbered node after node. `network.bandwidth` is
    that of all links out of one node together. `levels` group neighbouring nodes, smaller groups
    first. `used`: how many devices of each node take ranks, the first ones; empty means all."""

    FORM: ClassVar = ClusterForm

    nodes: tuple[Node, ...]
    network: Link
    name: str = "cluster"
    levels: tuple[Level, ...] = ()
    used: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes or min(node.devices for node in self.nodes) < 1:
            raise InvalidInput(
                "a cluster has at least one node, and each node at least one device",
                got=f"nodes with {[node.devices for node in self.nodes]} devices",
                remedy='Cluster.preset("dgx-h100", nodes=2)',
            )
        sizes = [1, *(level.nodes for level in self.levels)]
        if any(wider % size or wider == size for size, wider in itertools.pairwise(sizes)):
            raise InvalidInput(
                "each level has groups of several of the level below it",
                got=", ".join(
                    f"{level.name} of {counted(level.nodes, 'node')}" for level in self.levels
                ),
                remedy="as in levels of 4 and of 32 nodes",
            )
        counts = [node.devices for node in self.nodes]
        if self.used and (len(self.used) != len(counts) or not _is_part(self.used, counts)):
            raise InvalidInput(
                "of each node some devices are used, or none, and of some node at least one",
                got=f"used={self.used} of nodes with {counts} devices",
                remedy="used=() for all of them",
            )
        if self.devices > MOST:
            raise InvalidInput(
                f"a cluster has at most {MOST} devices",
                got=f"{counted(self.devices, 'device')} in {counted(len(self.nodes), 'node')}",
                remedy="plan for a part of it",
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Return the hash, computed once: a cluster may have thousands of nodes."""
        return hash((self.nodes, self.network, self.name, self.levels, self.used))

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Cluster:
        """Return a machine known by name: dgx-a100, dgx-h100, dgx-v100, h200, piz-daint."""
        node, network = preset(name)
        if not is_count(nodes) or nodes * node.devices > MOST:
            raise InvalidInput(
                f"a cluster has a whole number of nodes, and at most {MOST} devices",
                got=f"{name} with {nodes!r} nodes of {node.devices}",
                remedy=f"nodes=1, or as many as {MOST // node.devices}",
            )
        return cls((node,) * nodes, network, name)

    @classmethod
    def local(cls, devices: int, measure: bool = True) -> Cluster:
        """Return this machine: its GPUs where it has some, known by name or measured.

        Otherwise its devices are processes on the CPU, measured once (seconds) and then cached in a
        file. More devices than the machine has GPUs stand for several such machines; under
        torchrun, ranks that share a GPU each get a part of it. What `autopar calibrate` found for
        so many devices is applied. `measure=False` leaves all of it out.
        """
        if not is_count(devices):
            raise InvalidInput(
                "a cluster has a whole number of devices, at least 1",
                got=f"Cluster.local({devices!r})",
                remedy="Cluster.local(8)",
            )
        if torch.cuda.is_available():
            cluster = cls(*local_gpus(devices), "local")
        else:
            node = local_node(devices, measure=measure)
            cluster = cls((node,), node.link, "local")
        return cluster.at(cached_pace(cluster.device.name, devices)) if measure else cluster

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file; see `autopar.cluster.cluster_file` for what it may hold."""
        return read_cluster(Path(path), cls)

    def save(self, path: str | Path) -> None:
        """Write the TOML file that `load` reads."""
        text = cluster_text(self.name, self._runs(), self.network, self.levels, self.used)
        write_file(path, text, "a cluster file")

    def at(self, pace: Pace) -> Cluster:
        """Return these machines at a pace: their work takes `pace` times as long."""
        nodes = tuple(node_at_pace(node, pace) for node in self.nodes)
        levels = tuple(pace.level(level) for level in self.levels)
        return replace(self, nodes=nodes, network=pace.link(self.network), levels=levels)

    @property
    def devices(self) -> int:
        """Return the number of devices that take ranks."""
        return sum(self.used_of_nodes)

    @property
    def used_of_nodes(self) -> tuple[int, ...]:
        """Return the number of devices of each node that take ranks."""
        return self.used or tuple(node.devices for node in self.nodes)

    @property
    def node_of(self) -> Ranks:
        """Return the number of the node of each rank."""
        return self._links.node_of

    @property
    def devices_per_node(self) -> int:
        """Return the fewest devices that take ranks in any used node."""
        return min(used for used in self.used_of_nodes if used)

    @cached_property
    def device(self) -> Device:
        """Return the device that lock-step work waits for: the weakest in each respect."""
        return self.weakest(range(self.devices))

    def weakest(self, ranks: Iterable[int]) -> Device:
        """Return a device as weak in each respect as the weakest of `ranks`."""
        kinds = self._kinds(ranks)
        return kinds[0] if len(kinds) == 1 else Device.weakest(kinds)

    def strongest(self, ranks: Iterable[int]) -> Device:
        """Return a device as strong in each respect as the strongest of `ranks`: none is faster."""
        kinds = self._kinds(ranks)
        return kinds[0] if len(kinds) == 1 else Device.strongest(kinds)

    def spare(self, limit: float, places: Sequence[Ranks]) -> list[float]:
        """Return the bytes that the devices of each place have above `limit`. Return zeros where
        the user set a limit that differs from what a plan counts on."""
        if limit != self.device.usable_memory:
            return [0.0] * len(places)
        return [self.weakest(ranks).usable_memory - limit for ranks in places]

    def with_reserve(self, bytes_: float) -> Cluster:
        """Return these machines with so many bytes of each device left for what is no tensor."""
        nodes = tuple(
            replace(node, device=replace(node.device, reserve=bytes_)) for node in self.nodes
        )
        return replace(self, nodes=nodes)

    def fullest_host(self, needed: NDArray[np.float64]) -> HostLoad:
        """Return the load of the host with the least room; `needed`: bytes by rank.

        The devices of a node share its host: each brings its part of the memory.
        """
        node_of = self.node_of[: len(needed)]
        ranks, sums = np.bincount(node_of), np.bincount(node_of, needed)
        hosts = zip(self.nodes, ranks.tolist(), sums.tolist())
        loads = [HostLoad(n, size, n * node.device.host.memory) for node, n, size in hosts if n]
        return min(loads, key=lambda load: load.room)

    def _kinds(self, ranks: Iterable[int]) -> list[Device]:
        nodes = np.unique(self.node_of[np.fromiter(ranks, int)])
        return list(dict.fromkeys(self.nodes[node].device for node in nodes.tolist()))

    def require_room(self, mesh: Mesh) -> None:
        """Refuse a mesh of more ranks than there are devices."""
        if mesh.size > self.devices:
            raise InvalidInput(
                "a mesh has at most as many ranks as the cluster has devices",
                got=f"{mesh}: {counted(mesh.size, 'rank')} on {counted(self.devices, 'device')}",
                remedy="make the mesh smaller or add nodes",
            )

    def axis_links(self, mesh: Mesh) -> dict[str, AxisLink]:
        """Return for each axis of `mesh` the link between the members of its groups."""
        return {axis: self.group_link(mesh, (axis,)) for axis in mesh}

    def group_link(self, mesh: Mesh, axes: Sequence[str]) -> AxisLink:
        """Return the link between the members of a group over all of `axes`."""
        return self.place_links(mesh, axes)[0]

    def place_links(
        self, mesh: Mesh, axes: Sequence[str], along: str | None = None
    ) -> tuple[AxisLink, ...]:
        """Return the link of groups over `axes` for each place `along` an axis (None: a single
        place). All groups of all places are busy at once."""
        self.require_room(mesh)
        return self._links.of_axes(mesh, axes, along)

    def message_ways(
        self, places: Sequence[Ranks], pairs: Iterable[tuple[int, int]]
    ) -> Mapping[tuple[int, int], MessageLink]:
        """Return the link of messages for each pair of places; `places` holds the ranks of each."""
        return self._links.of_messages(places, pairs)

    def replica_links(
        self, places: Sequence[Ranks], replicas: Sequence[Sequence[int]]
    ) -> tuple[AxisLink, ...]:
        """Return one link for each entry of `replicas`, a list of places that hold the same stage.
        The ranks that stand for one another form groups, all of them busy at once."""
        groups = [np.stack([places[place] for place in copies], axis=1) for copies in replicas]
        place_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        return self._links.of_groups("replicas", np.concatenate(groups), place_of)

    @cached_property
    def _links(self) -> ClusterLinks:
        return ClusterLinks(self.nodes, self.used_of_nodes, self.network, self.levels)

    def first(self, ranks: int) -> Cluster:
        """Return this cluster with only as many devices used as a mesh of `ranks` takes."""
        ends = itertools.accumulate(self.used_of_nodes)
        used = (min(n, max(0, ranks - end + n)) for n, end in zip(self.used_of_nodes, ends))
        return replace(self, used=tuple(used))

    @property
    def in_use(self) -> Cluster:
        """Return this cluster without the nodes of which no device is used."""
        some = [(node, used) for node, used in zip(self.nodes, self.used_of_nodes) if used]
        if len(some) == len(self.nodes):
            return self
        nodes, used = zip(*some)
        is_all = used == tuple(node.devices for node in nodes)
        return replace(self, nodes=nodes, used=() if is_all else used)

    @property
    def taken(self) -> str:
        """Return a text that names the devices that take ranks."""
        device_count = sum(node.devices for node in self.nodes)
        some = (
            f"{self.devices} of {device_count} devices used, "
            if self.devices < device_count
            else ""
        )
        nodes = counted(sum(used > 0 for used in self.used_of_nodes), "node")
        kinds = Counter[str]()
        for node, used in zip(self.nodes, self.used_of_nodes):
            kinds[node.device.name] += used
        devices = ", ".join(f"{count} x {name}" for name, count in kinds.items() if count)
        return f"{some}{devices} in {nodes}"

    def to_form(self) -> ClusterForm:
        runs = (
            EqualNodes(node.device, node.devices, node.link, node.rails, count=count)
            for node, count in self._runs()
        )
        return ClusterForm(self.name, self.network, tuple(runs), self.levels, self.used)

    @classmethod
    def of_form(cls, form: ClusterForm) -> Cluster:
        runs = (
            (Node(run.device, run.devices, run.link, run.rails),) * run.count for run in form.nodes
        )
        nodes = tuple(itertools.chain(*runs))
        return cls(nodes, form.network, form.name, form.levels, form.used)

    def _runs(self) -> list[tuple[Node, int]]:
        return [(node, len(list(run))) for node, run in itertools.groupby(self.nodes)]

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {counted(self.devices, 'device')} in {counted(len(self.nodes), 'node')}"
        ]
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
            if node.rails > 1:
                lines.append(f"      rails:   {node.rails}, of which each device has one")
        if len(self.nodes) > 1:
            lines.append(f"  between: {_link_text(self.network)} for each node")
        for level in self.levels:
            link = _link_text(Link(level.alpha, level.bandwidth))
            lines.append(f"  {level.name}: {link} for each {counted(level.nodes, 'node')}")
        lines += [f"  not used: {idle}" for idle in self.idle]
        return "\n".join(part for line in lines for part in wrap_line(line))

    @property
    def idle(self) -> list[str]:
        """Return the unused devices, one text for equal nodes."""
        numbered = zip(self.nodes, self.used_of_nodes, itertools.count())
        rows = [
            (f"{node.devices - used} of {node.devices} x {node.device.name}", number)
            for node, used, number in numbered
            if used < node.devices
        ]
        texts = []
        for text, rows_of_text in itertools.groupby(rows, key=lambda row: row[0]):
            numbers = [str(number) for _, number in rows_of_text]
            texts.append(f"{text} in {plural('node', len(numbers))} {', '.join(numbers)}")
        return texts


def _is_part(used: Sequence[int], counts: Sequence[int]) -> bool:
    return sum(used) > 0 and all(0 <= some <= count for some, count in zip(used, counts))


def _host_text(host: Host) -> str:
    copies = f"{scaled(host.copy_bandwidth, 'B/s')}, {host.copy_alpha * 1e6:.3g} µs"
    return f"{scaled(host.memory, 'B')}{', its own memory' * host.is_device}, {copies}"


def _link_text(link: Link) -> str:
    return f"{scaled(link.bandwidth, 'B/s')}, {link.alpha * 1e6:.3g} µs"
