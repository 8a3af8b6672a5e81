"""Clusters: presets, links of axes, files and their errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar as ap
from autopar.base.schema import read, write
from autopar.cluster import Cluster, Device, Host, Link, Node
from autopar.cluster.cluster_part import PipelineLine
from autopar.cluster.presets import preset
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.text.tables import WIDTH
from autopar.text.units import scaled

NAMES = ("dgx-a100", "dgx-h100", "dgx-v100", "h200", "piz-daint")


@pytest.mark.parametrize("name", NAMES)
def test_presets(name: str) -> None:
    cluster = Cluster.preset(name, nodes=3)
    assert cluster.devices == 3 * (1 if name == "piz-daint" else 8)
    assert cluster.device.peak("f32") > 1e12
    assert read(Cluster, write(cluster)) == cluster
    assert f"{cluster.devices} devices in 3 nodes" in str(cluster)


@pytest.mark.parametrize("name", ["local", *NAMES])
def test_a_printed_cluster_is_no_wider_than_a_page(name: str) -> None:
    cluster = Cluster.local(4, measure=False) if name == "local" else Cluster.preset(name, nodes=3)
    lines = str(cluster).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert f"      inside:  {scaled(cluster.nodes[0].link.bandwidth, 'B/s')}, " in str(cluster)
    assert "of it reached" in " ".join(str(cluster).split())


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_survives_its_file(name: str, tmp_path: Path) -> None:
    (one, network), (other, _) = preset(name), preset("dgx-v100")
    slower = replace(one, device=replace(one.device, bandwidth=1e11))
    measured = replace(one.link, measured={("all_reduce", 4): (1e-6, 5e9)})
    cluster = Cluster((one, one, slower, other, replace(one, link=measured)), network, "some")
    cluster.save(tmp_path / "cluster.toml")
    read = Cluster.load(tmp_path / "cluster.toml")
    assert read.to_form().nodes[1].device.name == f"{one.device.name}, 2"
    named = replace(read.nodes[2], device=replace(read.nodes[2].device, name=one.device.name))
    assert replace(read, nodes=(*read.nodes[:2], named, *read.nodes[3:])) == cluster


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(InvalidInput) as error:
        Cluster.preset("dgx-2")
    assert all(name in str(error.value) for name in NAMES)


def test_the_last_axis_is_inside_a_node_and_the_first_between() -> None:
    links = Cluster.preset("dgx-h100", nodes=16).axis_links(Mesh(pp=4, dp=4, tp=8))
    assert {axis: link.level for axis, link in links.items()} == {
        "pp": "between",
        "dp": "between",
        "tp": "inside",
    }
    assert links["tp"].bandwidth == 370e9
    # Eight rings leave each node at once and share its 370 GB/s.
    assert links["dp"].bandwidth == 370e9 / 8


def test_an_axis_that_fills_two_nodes_has_the_whole_way_out_for_its_one_ring() -> None:
    link = Cluster.preset("dgx-h100", nodes=2).axis_links(Mesh(tp=16))["tp"]
    assert (link.level, link.bandwidth) == ("between", 370e9)
    # All-to-all: 8 members send half of what they hold to the other node.
    assert link.of("all_to_all")[1] == pytest.approx(370e9 / 8 / 0.5 * 15 / 16)


def test_a_device_of_a_known_machine_sends_over_its_own_adapter() -> None:
    """Four stages of four devices on two nodes: between the second and the third, four send."""
    for name, share in (("dgx-v100", 4), ("dgx-a100", 8), ("dgx-h100", 8)):
        cluster, line = Cluster.preset(name, nodes=2), PipelineLine("pp", 4, 4)
        ways = cluster.message_ways(line.ranks, [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)])
        assert ways[1, 2].bandwidth == cluster.network.bandwidth / share


def test_two_axes_in_one_node() -> None:
    links = Cluster.preset("dgx-a100").axis_links(Mesh(dp=2, tp=4))
    assert {link.level for link in links.values()} == {"inside"}


def test_groups_over_several_axes() -> None:
    cluster, mesh = Cluster.preset("dgx-a100", nodes=2), Mesh(pp=2, dp=2, tp=4)
    assert cluster.group_link(mesh, ("dp", "tp")).level == "inside"
    assert cluster.group_link(mesh, ("pp", "tp")).level == "between"
    assert cluster.group_link(mesh, ("pp", "tp")).size == 8


def test_mixed_nodes_wait_for_the_weakest() -> None:
    (old, network), (new, _) = preset("dgx-v100"), preset("dgx-h100")
    cluster = Cluster((old, new), network)
    assert cluster.devices == 16
    assert cluster.device.memory == 32e9
    assert cluster.device.peak("f16") == pytest.approx(125e12 * 0.7)
    assert cluster.device.peak("bf16") == pytest.approx(15.7e12 * 0.7)  # a V100 has none: as f32
    assert cluster.weakest(range(8, 16)).name == "H100 SXM 80 GB"
    links = cluster.axis_links(Mesh(dp=2, tp=8))
    assert links["tp"].bandwidth == 120e9
    host = cluster.device.host
    assert (host.memory, host.copy_bandwidth) == (64e9, 12e9)
    assert host.copied(12e9, copies=3) == pytest.approx(1 + 3 * host.copy_alpha)
    assert host.processor.peak("f32") == host.flops
    assert host.processor.memory == 64e9


def test_places_of_a_pipeline_have_the_links_of_their_own_machines() -> None:
    (old, network), (new, _) = preset("dgx-v100"), preset("dgx-h100")
    cluster, mesh = Cluster((new, old), network), Mesh(pp=2, tp=8)
    assert cluster.group_link(mesh, ("tp",)).bandwidth == 120e9
    places = cluster.place_links(mesh, ("tp",), along="pp")
    assert [link.bandwidth for link in places] == [370e9, 120e9]
    assert cluster.group_link(mesh, ("tp",)).bandwidth == 120e9


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at most as many ranks"):
        Cluster.preset("dgx-h100").axis_links(Mesh(dp=16))


def test_local_has_plain_constants_without_measuring() -> None:
    cluster = Cluster.local(4, measure=False)
    assert (cluster.devices, len(cluster.nodes)) == (4, 1)
    assert cluster.axis_links(Mesh(dp=4))["dp"].level == "inside"
    with pytest.raises(InvalidInput):
        Cluster.local(0)


def test_local_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.cluster import calibration

    runs: list[int] = []
    timings = [("all_reduce", 2, 1000, 1e-3), ("all_reduce", 2, 1_001_000, 3e-3)]
    figures = {
        "flops": {"f32": 1e11, "f64": 5e10},
        "overhead": 1e-6,
        "half_flops": 1e5,
        "bandwidth": 1e10,
        "copy": (1e-6, 5e9),
        "overlap": 0.25,
        "collectives": timings,
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        calibration, "_run_measurement", lambda n, times: runs.append((n, times)) or figures
    )
    first, second = Cluster.local(2), Cluster.local(2)
    assert runs == [(2, 1)]
    assert first == second
    (path,) = tmp_path.glob("autopar/local-*.json")
    whole = path.read_text()
    wrong = whole.replace("1e-06", "-1.0"), whole.replace("0.25", "NaN")
    for text in (whole[:40], "", whole.replace("overlap", "other"), *wrong):  # as cut off
        path.write_text(text)
        runs.clear()
        assert Cluster.local(2) == Cluster.local(2) == first
        assert runs == [(2, 1)]
    alpha, bandwidth = first.axis_links(Mesh(dp=2))["dp"].of("all_reduce")
    assert alpha == pytest.approx(1e-3 / 2)
    assert bandwidth == pytest.approx(1e6 / 2e-3)
    assert first.device.overlap == 0.25
    host = first.device.host
    assert (host.copy_alpha, host.copy_bandwidth, host.is_device) == (1e-6, 5e9, True)
    assert host.memory == first.device.memory


FILE = """\
name = "two kinds"
[device.small]
flops = { bf16 = 100e12, f32 = 10e12 }
memory = 16e9
bandwidth = 0.7e12

[[nodes]]
count = 2
device = "small"
devices = 4
link = { alpha = 3e-6, bandwidth = 100e9 }

[[nodes]]
count = 1
preset = "dgx-a100"
"""


def test_a_file_with_nodes_of_two_kinds(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    cluster = Cluster.load(path)
    assert (cluster.name, cluster.devices, len(cluster.nodes)) == ("two kinds", 16, 3)
    assert cluster.device.name == "small | A100 80 GB"
    assert cluster.network.bandwidth == 185e9
    path.write_text(FILE + "[network]\nalpha = 1e-6\nbandwidth = 5e9\n")
    assert Cluster.load(path).network == Link(1e-6, 5e9)
    path.write_text(FILE.replace("bandwidth = 0.7e12", "bandwidth = 0.7e12\noverlap = 0.6", 1))
    assert Cluster.load(path).device.overlap == 0.6
    host = "bandwidth = 0.7e12\nhost = { memory = 1e9, copy_bandwidth = 3e9 }"
    path.write_text(FILE.replace("bandwidth = 0.7e12", host, 1))
    assert Cluster.load(path).device.host == Host(1e9, copy_bandwidth=3e9)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("bandwidth = 0.7e12", "bandwith = 0.7e12", 5, "did you mean 'bandwidth'"),
        ("memory = 16e9", 'memory = "16 GB"', 4, "device.small.memory is a number"),
        ("count = 1", "count = -1", 14, "nodes.1.count is a whole number"),
        ("bandwidth = 100e9", "bandwidth = 0", 11, "nodes.0.link.bandwidth is a number"),
        ('device = "small"', 'device = "smal"', 9, "nodes.0.device names a device"),
        ("devices = 4\n", "", 7, "nodes.0 needs the key 'devices'"),
        ('"dgx-a100"', '"dgx"', 15, "nodes.1.preset is known"),
        (", f32 = 10e12", "", 3, "device.small.flops has a rate for f32"),
        ("alpha = 3e-6", "alpha = -3e-6", 11, "nodes.0.link.alpha is a number, at least 0"),
        ("memory = 16e9", "memory = 16e9\nhost = { memory = 0 }", 5, "device.small.host.memory is"),
        ("memory = 16e9", "memory = 16e9\nmemory = 32e9", 5, "'memory = 32e9': Cannot overwrite"),
        ("bf16 = 100e12", "bf16 = 1e12, bf16 = 2e12", 3, "Duplicate inline table key 'bf16'"),
        ("[[nodes]]", "[device.small]\n[[nodes]]", 7, "'[device.small]': Cannot declare"),
        ("[[nodes]]", "[nodes]", 13, "'[[nodes]]': Cannot"),
        ("0.7e12", "", 5, "'bandwidth =': Invalid value"),
    ],
)
def test_a_wrong_file_names_key_and_line(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    path = tmp_path / "cluster.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(InvalidInput) as error:
        Cluster.load(path)
    assert says in str(error.value)
    assert str(error.value.source) == f"{path}:{line}"


@pytest.mark.parametrize("text", ["", "nodes = []", "nodes = 3", "[nodes]\ncount = 1", "[network]"])
def test_a_file_without_nodes_is_told_to_have_some(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"nodes are one or more tables \[\[nodes\]\]") as error:
        Cluster.load(path)
    assert 'write [[nodes]], and below it preset = "dgx-h100"' in str(error.value.remedy)


def test_a_file_that_is_not_toml_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for text, line in (("name = \n", 1), ("name = 'a'\n[nodes", 2)):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="a cluster file is TOML") as error:
            Cluster.load(path)
        assert str(error.value.source) == f"{path}:{line}"
    with pytest.raises(InvalidInput, match="can be read"):
        Cluster.load(tmp_path / "none.toml")


def test_nodes_of_one_device() -> None:
    device = Device("tiny", {"f32": 1e9}, memory=1e9, bandwidth=1e9)
    cluster = Cluster((Node(device, 1, Link(1e-6, 1e9)),) * 4, Link(2e-6, 5e8))
    link = cluster.axis_links(Mesh(dp=4))["dp"]
    assert (link.level, link.alpha, link.bandwidth) == ("between", 2e-6, 5e8)
    with pytest.raises(InvalidInput):
        Cluster((), Link(1e-6, 1e9))


@pytest.mark.parametrize("mode", ["auto", "propagate"])
@pytest.mark.parametrize("mesh", [Mesh(pp=4, dp=4), Mesh(dp=64)], ids=str)
def test_a_mesh_of_more_ranks_than_devices_is_refused(mesh: Mesh, mode: str) -> None:
    model, inputs = torch.nn.Linear(4, 4), (torch.zeros(64, 4),)
    with pytest.raises(InvalidInput, match="at most as many ranks"):
        ap.plan(model, inputs, mesh=mesh, mode=mode, cluster=Cluster.preset("dgx-h100"))


def test_a_plan_leaves_the_reserve_of_its_devices_unless_it_is_told_otherwise() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
    cluster = Cluster.preset("dgx-a100")
    device = cluster.device
    assert device.usable_memory == device.memory - device.reserve < device.memory

    def limit(**options: object) -> float | None:
        made = ap.plan(model, (x,), mesh=Mesh(dp=2), cluster=cluster, **options)
        again = ap.plan(model, (x,), mesh=Mesh(dp=2), cluster=made.cluster)
        assert again.limit == made.cluster.device.usable_memory
        return made.limit

    assert limit() == device.usable_memory
    assert limit(reserve="8GB") == device.memory - 8e9
    assert limit(reserve=0) == limit(memory=device.memory) == device.memory
    assert Cluster.local(2, measure=False).device.reserve == 0
    with pytest.raises(InvalidInput, match="leaves some of a device's memory"):
        limit(reserve=device.memory)
    with pytest.raises(InvalidInput, match="of which a plan uses the rest"):
        limit(reserve="8GB", memory="40GB")


def test_unlike_devices_have_the_least_and_the_most_that_any_leaves() -> None:
    large, small = (preset(name)[0].device for name in ("dgx-h100", "dgx-v100"))
    large = replace(large, reserve=70e9)
    assert Device.weakest([large, small]).usable_memory == large.usable_memory
    assert Device.strongest([large, small]).usable_memory == small.usable_memory
