"""Which GPU a rank takes, and what planning takes the GPUs of this machine for; none is needed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.cluster import gpus
from autopar.runtime.backends import process_groups

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with GPUs: how many, of which name, and which one was chosen."""
    chosen: list[int] = [0]

    def make(count: int, name: str = "NVIDIA A100-SXM4-40GB", current: int = 0) -> list[int]:
        chosen[0] = current
        kind = SimpleNamespace(name=name, total_memory=42e9)
        for key, value in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: chosen[0],
            "set_device": lambda index: chosen.__setitem__(0, index),
            "get_device_properties": lambda index: kind,
        }.items():
            monkeypatch.setattr(torch.cuda, key, value)
        return chosen

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return make


def test_local_knows_gpus_by_name(machine: Any) -> None:
    machine(4)
    cluster = ap.Cluster.local(4)
    assert (cluster.devices, len(cluster.nodes)) == (4, 1)
    assert cluster.device.name == "A100 40 GB"
    assert (cluster.device.memory, cluster.device.bandwidth) == (42e9, 1.555e12)
    assert cluster.axis_links(ap.Mesh(dp=4))["dp"].bandwidth == 235e9
    two = ap.Cluster.local(8)
    assert [node.devices for node in two.nodes] == [4, 4]
    assert two.axis_links(ap.Mesh(dp=2, tp=4))["dp"].level == "between"


def test_the_links_of_a_kind_are_those_of_its_preset(machine: Any) -> None:
    for name, known_as in (
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "dgx-v100"),
    ):
        machine(8, name)
        found, expected = ap.Cluster.local(16), ap.Cluster.preset(known_as, nodes=2)
        assert (found.network, found.nodes[0].link) == (expected.network, expected.nodes[0].link)
    machine(8, "NVIDIA A100 80GB PCIe")
    assert ap.Cluster.local(16).network == gpus.NETWORK


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80 GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80 GB"),
        ("NVIDIA H200", "H200 141 GB"),
        ("Tesla V100-SXM2-32GB", "V100 32 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_kinds_by_name(name: str, kind: str | None) -> None:
    found = gpus.known_gpu(name)
    assert (found and found.name) == kind


def test_a_gpu_of_no_known_kind_is_measured(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1, "GPU of tomorrow")
    on_cpu = gpus.measure_gpu(CPU, "tomorrow")
    assert on_cpu.peak("f32") > 1e8
    monkeypatch.setattr(gpus, "measure_gpu", lambda device, name: on_cpu)
    assert ap.Cluster.local(1).device.flops == on_cpu.flops


def test_ranks_that_share_a_gpu_share_its_rates(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = ap.Cluster.local(4)
    assert [node.devices for node in cluster.nodes] == [4]
    assert cluster.device.memory == 42e9 / 4
    assert cluster.device.peak("f32") == gpus.A100.peak("f32") / 4


def test_planning_takes_gpus_for_what_they_are(machine: Any) -> None:
    machine(2)
    plan = ap.plan(nn.Linear(4, 4), (torch.ones(8, 4),), mesh=ap.Mesh(dp=2), mode="data")
    assert plan.cluster.device.name == "A100 40 GB"
    assert plan.limit == plan.cluster.device.usable_memory < 42e9


def test_a_rank_takes_its_own_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = machine(4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert process_groups._own_device(CPU) == torch.device("cuda", 3)
    assert chosen == [3]


def test_without_a_local_rank_it_counts_and_says_so(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(4)
    monkeypatch.setenv("RANK", "6")
    with pytest.warns(UserWarning, match="rank 6 takes GPU 2 of 4"):
        assert process_groups._own_device(CPU) == torch.device("cuda", 2)


def test_the_gpu_that_was_chosen_is_kept(machine: Any) -> None:
    chosen = machine(4, current=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert process_groups._own_device(CPU) == torch.device("cuda", 2)
    assert chosen == [2]


def test_more_ranks_than_gpus_are_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ap.AutoparError, match="4 ranks on a machine with 2 GPUs"):
        process_groups._own_device(CPU)


def test_over_gloo_a_rank_computes_where_its_model_is(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2)
    monkeypatch.setattr(process_groups, "moves_through_host", lambda group: True)
    monkeypatch.setattr(process_groups.dist, "group", SimpleNamespace(WORLD=object()))
    assert process_groups._own_device(CPU) == CPU
    assert process_groups._own_device(GPU) == GPU
