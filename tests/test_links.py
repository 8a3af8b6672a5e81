"""Links: levels in any number, rails, who shares a way out, and the places of a pipeline."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.base.schema import read, write
from autopar.cluster import AxisLink, Cluster, Device, Level, Link, Node
from autopar.cluster.cluster_part import ClusterPart, PipelineLine
from autopar.errors import InvalidInput
from autopar.mesh import Mesh

DEVICE = Device("tiny", {"f32": 1e9}, memory=1e9, bandwidth=1e9)
FAST = replace(DEVICE, name="fast", flops={"f32": 4e9}, memory=2e9)
NODE = Node(DEVICE, 4, Link(1e-6, 100.0))
RACKS = (Level("rack", 2, 3e-6, 16.0), Level("hall", 4, 4e-6, 8.0))


def racks(nodes: int = 8, **changed: object) -> Cluster:
    return Cluster((NODE,) * nodes, Link(2e-6, 40.0), "racks", RACKS, **changed)


def test_each_level_is_shared_by_the_rings_that_leave_its_units() -> None:
    """Of 4 devices a node, 2 nodes a rack and 2 racks a hall: an axis of 2 halls, racks, nodes."""
    links = racks().axis_links(Mesh(hall=2, rack=2, node=2, device=4))
    found = {axis: (link.level, link.bandwidth, link.alpha) for axis, link in links.items()}
    assert found == {
        "device": ("inside", 100.0, 1e-6),
        "node": ("between", 40 / 4, 2e-6),
        "rack": ("rack", 16 / 8, 3e-6),
        "hall": ("hall", 8 / 16, 4e-6),
    }
    all_ = racks().axis_links(Mesh(x=32))["x"]
    assert (all_.level, all_.bandwidth) == ("hall", 8.0)  # one ring, which leaves each unit once


def test_a_ring_uses_as_many_rails_as_it_has_members_in_a_node() -> None:
    nodes = (replace(NODE, rails=4),) * 2
    cluster = Cluster(nodes, Link(2e-6, 40.0))
    assert cluster.axis_links(Mesh(dp=2, tp=4))["dp"].bandwidth == 10.0
    assert cluster.axis_links(Mesh(x=8))["x"].bandwidth == 40.0
    part = Cluster((replace(nodes[0], devices=4),) * 2, Link(2e-6, 40.0), used=(1, 1))
    assert part.axis_links(Mesh(dp=2))["dp"].bandwidth == 10.0  # alone, and on one rail
    assert replace(part, nodes=(NODE,) * 2).axis_links(Mesh(dp=2))["dp"].bandwidth == 40.0


def grids(ranks: int) -> list[Mesh]:
    """Meshes of up to four axes whose sizes divide well."""
    shapes = {
        shape
        for count in range(1, 5)
        for shape in itertools.product((1, 2, 3, 4, 8, 16, 32), repeat=count)
        if np.prod(shape) <= ranks and np.prod(shape) >= ranks // 2 and 1 not in shape
    }
    return [Mesh(**dict(zip("abcd", shape))) for shape in sorted(shapes)]


def test_equal_nodes_are_as_when_every_group_is_looked_at() -> None:
    links, compared = racks()._links, 0
    for mesh in grids(32):
        for count in range(1, len(mesh.names) + 1):
            for axes in itertools.combinations(mesh.names, count):
                others = [axis for axis in mesh if axis not in axes]
                for along in (None, *others):
                    even = links._even(mesh, axes, along)
                    if even is None:
                        continue
                    compared += 1
                    for one, other in zip(even, links._of_axes(mesh, axes, along), strict=True):
                        assert figures(one) == pytest.approx(figures(other))
                        assert (one.level, one.size) == (other.level, other.size)
    assert compared > 200


def figures(link: AxisLink) -> tuple[float, ...]:
    return link.alpha, link.bandwidth, link.exchange_bandwidth


def test_places_of_a_pipeline_that_lie_in_a_node_have_its_links_and_others_not() -> None:
    """Two nodes of three devices, three places of two: the second has a device of each node."""
    cluster = Cluster((replace(NODE, devices=3),) * 2, Link(2e-6, 40.0))
    line = PipelineLine("pp", 3, 2)
    first, second, third = cluster.place_links(Mesh(pp=3, dp=2), ("dp",), "pp")
    assert (first.level, second.level) == ("inside", "between")
    assert first == third
    assert (first.bandwidth, second.bandwidth) == (100.0, 40.0)
    best = ClusterPart.of(cluster, line)
    parts, kinds = best.kinds(Mesh(dp=2))
    assert kinds == [0, 1, 0]
    assert [part.group_link(Mesh(dp=2), ("dp",)) for part in parts] == [first, second]
    assert figures(best.group_link(Mesh(dp=2), ("dp",))) == figures(first)
    assert figures(best.among(0, 1).group_link(Mesh(dp=2), ("dp",))) == figures(second)


def test_an_axis_before_that_of_the_pipeline_has_its_own_ranks() -> None:
    """dp=2 of a place is in two nodes, though the place has only two ranks more."""
    cluster, mesh = racks(2), Mesh(dp=2, pp=2, tp=2)
    line = PipelineLine.of(mesh, "pp")
    assert [ranks.tolist() for ranks in line.ranks] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert line.mesh(Mesh(dp=2, tp=2)) == mesh
    split = Mesh(**{"dp.0": 1, "dp.1": 2, "tp": 2})
    assert line.mesh(split).names == ("dp.0", "dp.1", "pp", "tp")
    part = ClusterPart.of(cluster, line)
    inside = part.group_link(Mesh(dp=2, tp=2), ("tp",))
    across = part.group_link(Mesh(dp=2, tp=2), ("dp",))
    assert (inside.level, inside.bandwidth) == ("inside", 100.0)
    assert (across.level, across.bandwidth) == ("between", 40 / 4)  # of both places, at once


def test_messages_share_a_way_out_with_those_who_leave_beside_them() -> None:
    """Four places of two ranks in two nodes: one pair of neighbours is apart."""
    cluster, line = racks(2), PipelineLine("pp", 4, 2)
    pairs = [pair for one in range(3) for pair in ((one, one + 1), (one + 1, one))]
    ways = cluster.message_ways(line.ranks, pairs)
    assert (ways[0, 1].bandwidth, ways[0, 1].is_inside) == (100.0, True)
    assert ways[1, 2].bandwidth == ways[2, 1].bandwidth == 40 / 2
    assert (ways[1, 2].alpha, ways[1, 2].is_inside) == (2e-6, False)
    # With the first place after the last, both places of a node leave it.
    round_ = cluster.message_ways(line.ranks, [*pairs, (3, 0), (0, 3)])
    assert round_[1, 2].bandwidth == 40 / 4
    rails = replace(cluster, nodes=(replace(NODE, rails=4),) * 2)
    assert rails.message_ways(line.ranks, pairs)[1, 2].bandwidth == 40 / 4


def test_equal_nodes_in_another_order_are_the_same() -> None:
    kinds = [NODE, replace(NODE, device=FAST), NODE, replace(NODE, device=FAST)]
    cluster = Cluster(tuple(kinds), Link(2e-6, 40.0))
    swapped = Cluster((kinds[2], kinds[3], kinds[0], kinds[1]), Link(2e-6, 40.0))
    assert swapped == cluster
    for axes in (("dp",), ("tp",), ("dp", "tp")):
        mesh = Mesh(pp=2, dp=2, tp=4)
        assert swapped.place_links(mesh, axes, "pp") == cluster.place_links(mesh, axes, "pp")


def test_no_device_of_several_is_faster_than_the_strongest_in_any_respect() -> None:
    random_ = random.Random(1)
    for _ in range(50):
        kinds = [
            Device(
                str(number),
                {"f32": random_.uniform(1, 9), **({"bf16": 9.0} if number else {})},
                memory=random_.uniform(1, 9),
                bandwidth=random_.uniform(1, 9),
                efficiency=random_.uniform(0.1, 1),
                half_flops=random_.uniform(0, 9),
                half_bytes=random_.uniform(0, 9),
            )
            for number in range(3)
        ]
        strongest, weakest = Device.strongest(kinds), Device.weakest(kinds)
        for kind in kinds:
            for dtype in ("f32", "bf16"):
                times = [
                    (5.0 + one.half(dtype)) / one.peak(dtype) for one in (strongest, kind, weakest)
                ]
                assert times[0] <= times[1] * (1 + 1e-9)
                assert times[1] <= times[2] * (1 + 1e-9)
            assert strongest.memory >= kind.memory
            assert strongest.overhead <= kind.overhead


def test_levels_rails_and_what_is_used_survive_a_file(tmp_path: Path) -> None:
    nodes = (replace(NODE, rails=2), *(NODE,) * 3)
    used = Cluster(nodes, Link(2e-6, 40.0), "racks", RACKS[:1], used=(4, 4, 0, 2))
    for cluster in (racks(), used):
        cluster.save(path := tmp_path / "cluster.toml")
        assert Cluster.load(path) == cluster
        assert read(Cluster, write(cluster)) == cluster
    assert used.devices == 10
    assert used.idle == ["4 of 4 x tiny in node 2", "2 of 4 x tiny in node 3"]
    assert "not used: 2 of 4 x tiny in node 3" in str(used)
    assert "rack: 16 B/s, 3 µs for each 2 nodes" in str(used)
    text = path.read_text().replace("nodes = 2", "nodes = 0")
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"levels\.0\.nodes is a whole number") as error:
        Cluster.load(path)
    line = text.splitlines().index("nodes = 0") + 1
    assert str(error.value.source) == f"{path}:{line}"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"levels": (Level("rack", 2, 0, 1.0), Level("hall", 3, 0, 1.0))}, "several of the level"),
        ({"levels": (Level("rack", 1, 0, 1.0),)}, "several of the level"),
        ({"used": (4, 4)}, "some devices are used"),
        ({"used": (5, 4, 4, 4)}, "some devices are used"),
        ({"used": (0, 0, 0, 0)}, "some devices are used"),
    ],
)
def test_levels_and_use_that_contradict_the_nodes_are_refused(changed: dict, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Cluster((NODE,) * 4, Link(2e-6, 40.0), **changed)


def test_a_pace_slows_every_level() -> None:
    from autopar.cluster.pace import Pace

    slow = racks().at(Pace(1.0, 2.0))
    assert [(level.alpha, level.bandwidth) for level in slow.levels] == [(6e-6, 8.0), (8e-6, 4.0)]
