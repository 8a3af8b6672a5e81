"""Machine: the mesh on the nodes and links of a cluster, and what a step sends over them."""

from __future__ import annotations

from itertools import groupby

from autopar.mesh import Mesh
from autopar.planner.candidate import Candidate
from autopar.report.traffic import Axes, LinkTraffic
from autopar.text.drawing import Drawing
from autopar.text.units import bytes_text, counted, scaled

_NODES, _DEVICES = 4, 16  # that are drawn
_WIDTH, _BOX, _ROW = 960.0, 54.0, 30.0


def draw_machine(candidate: Candidate, sent: list[LinkTraffic]) -> Drawing:
    """The first nodes with their devices, and under them a line for each axis."""
    cluster, mesh = candidate.cluster, candidate.whole_mesh
    nodes = cluster.nodes[:_NODES]
    shown = min(max(node.devices for node in nodes), _DEVICES)
    columns = max(1, min(shown, int(_WIDTH / len(nodes) / _BOX)))
    lines = -(-shown // columns)
    height = 44 + lines * (_BOX - 14) + 12
    groups = {entry.axes for entry in sent if len(entry.axes) > 1}
    rows = [*((axis,) for axis in mesh), *sorted(groups)]
    label = f"{mesh} on {_node_kinds(cluster.nodes)}"
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
    words = f"and {counted(more, 'more node')}; " if more else ""
    if len(cluster.nodes) > 1:
        picture.text(8, height + 10, f"{words}{between} between nodes, of each")
    for number, axes in enumerate(rows):
        _links(picture, candidate, axes, height + 18 + _ROW * number, sent)
    return picture


def _node_kinds(nodes: tuple) -> str:
    kinds = [(name, len([*some])) for name, some in groupby(n.device.name for n in nodes)]
    return ", ".join(f"{counted(count, 'node')} of {name}" for name, count in kinds)


def _device(picture: Drawing, mesh: Mesh, rank: int, x: float, y: float) -> None:
    place = mesh.coordinate(rank)
    where = ", ".join(f"{axis} {number}" for axis, number in place.items())
    picture.box(x, y, _BOX - 6, _BOX - 20, "device", title=f"rank {rank}: {where}")
    picture.text(x + 5, y + 14, str(rank))
    if len(place) > 1:  # else it is the rank
        picture.text(x + 5, y + 27, ",".join(map(str, place.values())), "small")


def _links(
    picture: Drawing, candidate: Candidate, axes: Axes, y: float, sent: list[LinkTraffic]
) -> None:
    """An axis, or several over which something goes at once: size, link, and what goes there."""
    mesh = candidate.whole_mesh
    link = candidate.cluster.group_link(mesh, axes)
    axes_bytes = sum(entry.bytes for entry in sent if entry.axes == axes)
    most = max((entry.bytes for entry in sent), default=0.0) * 2 or 1.0
    where = {"inside": "inside of nodes", "between": "between nodes"}.get(link.level, link.level)
    speed = scaled(link.bandwidth, "B/s", 3)
    size = f"{' and '.join(axes)} = {mesh.degree(axes)}"
    words = f"{size}, {where}, {speed}: a rank sends {bytes_text(axes_bytes)} a step"
    picture.text(8, y + 12, words)
    picture.box(8, y + 17, _WIDTH - 16, 5, "idle")
    picture.box(8, y + 17, min(axes_bytes / most, 1.0) * (_WIDTH - 16), 5, "messages")
