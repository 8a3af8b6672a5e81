"""Machine: the mesh on the nodes and links of a cluster, and what a step sends over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from autopar.cluster import AxisLink
from autopar.cost.model import COLLECTIVES
from autopar.drawing import Drawing
from autopar.mesh import Mesh
from autopar.planner.candidate import Candidate
from autopar.strategies.node_info import info
from autopar.units import bytes_text, scaled

_NODES, _DEVICES = 4, 16  # that are drawn
_WIDTH, _BOX, _ROW = 960.0, 54.0, 30.0


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step over the links of a group along some axes, and for what."""

    axes: str
    what: str
    link: AxisLink
    bytes: float
    count: float  # collectives, or messages


def traffic(candidate: Candidate) -> list[Traffic]:
    """By axes and by what is sent, the most first."""
    found: dict[tuple[str, str], Traffic] = {}
    for axes, what, size, count in _sent(candidate):
        name = ", ".join(axes)
        before = found.get((name, what))
        link = candidate.cluster.group_link(candidate.whole_mesh, axes)
        size, count = (size + before.bytes, count + before.count) if before else (size, count)
        found[name, what] = Traffic(name, what, link, size, count)
    return sorted(found.values(), key=lambda one: -one.bytes)


def _sent(candidate: Candidate) -> Iterator[tuple[tuple[str, ...], str, float, float]]:
    """Axes, what for, bytes of one rank in a step, and in how many."""
    mesh, made = candidate.mesh, candidate.pipelining
    # How often a rank runs all of the program, and what part of its parameters it has.
    times, part = float(candidate.microbatches), 1.0
    if made is not None:
        times, part = (
            made.schedule.all_parts / made.schedule.ranks,
            made.schedule.pipes / made.schedule.ranks,
        )
    for node in candidate.rewritten.nodes:
        movement, joint, size = info(node).movement, info(node).joint, 0.0
        if movement is not None:
            size = float(info(node).bytes)
            kinds = [movement.kind, *([movement.backward] if info(node).learns else [])]
            for kind in kinds:
                if kind in COLLECTIVES:
                    ranks = mesh.degree(movement.axes)
                    yield movement.axes, kind, _of(kind, ranks, size) * times, times
        elif joint is not None:
            name = joint.joint.forward.__name__
            yield joint.axes, f"{name}, forward", float(info(node).bytes) * times, times
        elif info(node).sync and info(node).places is not None:
            size = float(info(node).type.local_bytes(mesh))
            ranks = mesh.degree(info(node).sync)
            yield info(node).sync, "sums of gradients", _of("all_reduce", ranks, size) * part, part
    if made is not None:
        size = 2 * sum(stage.receives for stage in made.stages) * times
        yield (made.axis,), "messages between stages", size, 2 * (len(made.stages) - 1) * times


def _of(kind: str, ranks: int, size: float) -> float:
    """Bytes that one rank sends in a collective."""
    return float(COLLECTIVES[kind](p=ranks, V=size, B=1.0, a=0.0))


def machine(candidate: Candidate, sent: list[Traffic]) -> Drawing:
    """The first nodes with their devices, and under them a line for each axis."""
    cluster, mesh = candidate.cluster, candidate.whole_mesh
    nodes = cluster.nodes[:_NODES]
    shown = min(max(node.devices for node in nodes), _DEVICES)
    columns = max(1, min(shown, int(_WIDTH / len(nodes) / _BOX)))
    lines = -(-shown // columns)
    height = 44 + lines * (_BOX - 14) + 12
    rows = [*mesh]
    label = f"{mesh} on {_about(cluster.nodes)}"
    picture = Drawing(_WIDTH, height + 18 + _ROW * len(rows), label)
    first, rank = 0.0, 0
    for number, (node, used) in enumerate(zip(nodes, cluster.used_of_nodes)):
        width = _WIDTH / len(nodes) - 8
        picture.box(first + 1, 18, width, height - 22, "node")
        speed = scaled(node.link.bandwidth, "B/s", 3)
        title = f"node {number}: {node.devices} x {node.device.name}, {speed}"
        picture.text(first + 8, 12, title)
        for place in range(min(used, shown)):
            x = first + 8 + place % columns * _BOX
            y = 28 + place // columns * (_BOX - 14)
            if rank + place < mesh.size:
                _device(picture, mesh, rank + place, x, y)
        rank += used
        first += _WIDTH / len(nodes)
    more = len(cluster.nodes) - len(nodes)
    between = scaled(cluster.network.bandwidth, "B/s", 3)
    words = f"and {more} more nodes; " if more else ""
    if len(cluster.nodes) > 1:
        picture.text(8, height + 10, f"{words}{between} between nodes, of each")
    for number, axis in enumerate(rows):
        _axis(picture, candidate, axis, height + 18 + _ROW * number, sent)
    return picture


def _about(nodes: tuple) -> str:
    kinds = [(name, len([*some])) for name, some in groupby(n.device.name for n in nodes)]
    return ", ".join(f"{count} nodes of {name}" for name, count in kinds)


def _device(picture: Drawing, mesh: Mesh, rank: int, x: float, y: float) -> None:
    place = mesh.coordinate(rank)
    where = ", ".join(f"{axis} {number}" for axis, number in place.items())
    picture.box(x, y, _BOX - 6, _BOX - 20, "device", title=f"rank {rank}: {where}")
    picture.text(x + 5, y + 14, str(rank))
    picture.text(x + 5, y + 27, " ".join(map(str, place.values())), "small")


def _axis(picture: Drawing, candidate: Candidate, axis: str, y: float, sent: list[Traffic]) -> None:
    """An axis: its size, its link, and the share of the traffic that it takes."""
    mesh = candidate.whole_mesh
    link = candidate.cluster.group_link(mesh, (axis,))
    own = sum(one.bytes for one in sent if axis in one.axes.split(", "))
    most = max((one.bytes for one in sent), default=0.0) * 2 or 1.0
    where = {"inside": "inside of nodes", "between": "between nodes"}.get(link.level, link.level)
    speed = scaled(link.bandwidth, "B/s", 3)
    words = f"{axis} = {mesh[axis]}, {where}, {speed}: a rank sends {bytes_text(own)} a step"
    picture.text(8, y + 12, words)
    picture.box(8, y + 17, _WIDTH - 16, 5, "idle")
    picture.box(8, y + 17, min(own / most, 1.0) * (_WIDTH - 16), 5, "messages")
