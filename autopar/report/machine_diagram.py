"""Machine: the mesh on the nodes and links of a cluster, and what a step sends over them."""

from __future__ import annotations

from itertools import groupby

from autopar.candidates.candidate import Candidate
from autopar.mesh import Mesh
from autopar.report.traffic import Axes, LinkTraffic
from autopar.text.drawing import WIDE, Drawing
from autopar.text.units import bytes_text, counted, scaled

_DEVICES = 16  # of a node that are drawn
_NODE, _BOX, _ROW = 240.0, 54.0, 30.0


def draw_machine(candidate: Candidate, sent: list[LinkTraffic], width: float = WIDE) -> Drawing:
    """The first nodes with their devices, and under them a line for each axis."""
    cluster, mesh = candidate.cluster, candidate.whole_mesh
    nodes = cluster.nodes[: int(width // _NODE)]
    shown = min(max(node.devices for node in nodes), _DEVICES)
    columns = max(1, min(shown, int(width / len(nodes) / _BOX)))
    lines = -(-shown // columns)
    height = 44 + lines * (_BOX - 14) + 12
    groups = {entry.axes for entry in sent if len(entry.axes) > 1}
    rows = [*((axis,) for axis in mesh), *sorted(groups)]
    label = f"{mesh} on {_node_kinds(cluster.nodes)}"
    row = _ROW if width == WIDE else _ROW + 14
    picture = Drawing(width, height + 18 + row * len(rows), label)
    first, rank = 0.0, 0
    for number, (node, used) in enumerate(zip(nodes, cluster.used_of_nodes)):
        picture.box(first + 1, 18, width / len(nodes) - 8, height - 22, "node")
        speed = scaled(node.link.bandwidth, "B/s", 3)
        title = f"node {number}: {node.devices} x {node.device.name}, {speed}"
        picture.text(first + 8, 12, title)
        for place in range(min(used, shown)):
            x = first + 8 + place % columns * _BOX
            y = 28 + place // columns * (_BOX - 14)
            if rank + place < mesh.size:
                _device(picture, mesh, rank + place, x, y)
        rank += used
        first += width / len(nodes)
    more = len(cluster.nodes) - len(nodes)
    between = scaled(cluster.network.bandwidth, "B/s", 3)
    words = f"and {counted(more, 'more node')}; " if more else ""
    if len(cluster.nodes) > 1:
        picture.text(8, height + 10, f"{words}{between} between nodes, of each")
    for number, axes in enumerate(rows):
        _links(picture, candidate, axes, height + 18 + row * number, sent)
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
    words = f"{size}, {where}, {speed}:", f"a rank sends {bytes_text(axes_bytes)} a step"
    for line in [" ".join(words)] if picture.width == WIDE else words:
        picture.text(8, y + 12, line)
        y += 14
    picture.box(8, y + 3, picture.width - 16, 5, "track")
    picture.box(8, y + 3, min(axes_bytes / most, 1.0) * (picture.width - 16), 5, "messages")
