"""The GPUs of this machine: kinds known by name, with the rates that their makers publish.

Dense rates, without sparsity, from the data sheets of NVIDIA: A100 (2021), H100 and H200 (2024),
B200 (2024), V100 (2020), P100 (2016), L4 and L40S (2023), A10, A30 and T4 (2019 to 2021), and the
white papers of Ampere and Ada for GeForce and RTX. "f16" and "bf16" are rates of tensor cores that
sum in f32. A GPU that no sheet names is measured here.

>>> known_gpu("NVIDIA A100-SXM4-40GB").bandwidth
1555000000000.0
>>> known_gpu("a GPU of tomorrow") is None
True
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from autopar.cluster.calibration import host_memory
from autopar.cluster.machines import REACHED, Device, Host, Link, Node
from autopar.cluster.presets import (
    A100,
    H100,
    H200,
    HOST_OF_PCIE_3,
    HOST_OF_PCIE_5,
    P100,
    V100,
    data_sheet,
    gpu_reserve,
    preset,
    rates,
)
from autopar.tensor_type import DTYPES

# The machines that GPUs of a kind stand in: their links are those of the preset.
MACHINES = {"V100": "dgx-v100", "A100": "dgx-a100", "H100": "dgx-h100", "H200": "h200"}
B200_LINK = Link(3e-6, 720e9)  # four fifths of NVLink 5, each direction
PCIE = Link(8e-6, 20e9)  # what peers reach over 16 lanes of the fourth generation
GRACE = Host(480e9, 5e-6, 400e9, 350e9, 3e12)  # NVLink-C2C, 450 GB/s each direction
NETWORK = Link(6e-6, 25e9)  # one adapter of 200 Gbit/s: a guess, where nothing is known of it


# The first whose words all stand in the name of the device is its kind.
_KNOWN_GPUS: tuple[tuple[str, Device], ...] = (
    ("B200", data_sheet("B200 180 GB", rates(37, 75, 2250), 180, 7700, host=HOST_OF_PCIE_5)),
    ("H200", H200),
    ("GH200", replace(H100, name="GH200 96 GB", memory=96e9, bandwidth=4.0e12, host=GRACE)),
    ("H100 PCIe", data_sheet("H100 PCIe 80 GB", rates(51, 51, 756), 80, 2000, host=HOST_OF_PCIE_5)),
    ("H100 NVL", data_sheet("H100 NVL 94 GB", rates(60, 60, 835), 94, 3900, host=HOST_OF_PCIE_5)),
    ("H100", H100),
    ("A100 PCIe 40GB", replace(A100, name="A100 PCIe 40 GB", memory=40e9, bandwidth=1.555e12)),
    ("A100 PCIe", replace(A100, name="A100 PCIe 80 GB", bandwidth=1.935e12)),
    ("A100 40GB", data_sheet("A100 40 GB", rates(19.5, 19.5, 312), 40, 1555, 1, efficiency=0.76)),
    ("A100", A100),
    ("V100 PCIe", data_sheet("V100 PCIe", rates(7, 14, 112, 0), 32, 900, 5, 2, HOST_OF_PCIE_3)),
    ("V100", V100),
    ("P100", P100),
    ("A30", data_sheet("A30", rates(10.3, 10.3, 165), 24, 933)),
    ("A10G", data_sheet("A10G", rates(0.49, 31.2, 125), 24, 600)),
    ("A10", data_sheet("A10", rates(0.49, 31.2, 125), 24, 600)),
    ("A6000", data_sheet("RTX A6000", rates(0.6, 38.7, 155), 48, 768)),
    ("L40S", data_sheet("L40S", rates(1.4, 91.6, 362), 48, 864)),
    ("L4", data_sheet("L4", rates(0.47, 30.3, 121), 24, 300)),
    ("T4", data_sheet("T4", rates(0.25, 8.1, 65, 0), 16, 320, 0, 0, HOST_OF_PCIE_3)),
    ("RTX 4090", data_sheet("RTX 4090", rates(1.3, 82.6, 165), 24, 1008)),
    ("RTX 3090", data_sheet("RTX 3090", rates(0.56, 35.6, 71), 24, 936)),
)


def local_gpus(devices: int) -> tuple[tuple[Node, ...], Link]:
    """Return nodes with `devices` GPUs such as this machine's, and their network."""
    count = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    crowd = max(1.0, ranks / count)  # how many ranks share a GPU
    device, link = min(
        (local_gpu(index) for index in range(min(count, devices))),
        key=lambda gpu: gpu[0].peak("f32"),
    )
    if crowd > 1:
        device = replace(
            device,
            flops={dtype: rate / crowd for dtype, rate in device.flops.items()},
            memory=device.memory / crowd,
            reserve=gpu_reserve(device.memory / crowd),
            bandwidth=device.bandwidth / crowd,
        )
        link = replace(link, bandwidth=link.bandwidth / crowd)
    share = min(ranks, devices)  # of this machine's memory
    host = replace(device.host, memory=host_memory() / share)
    device = replace(device, host=host)
    full, rest = divmod(devices, ranks)
    sizes = [ranks] * full + [rest] * (rest > 0)
    network = gpu_links(torch.cuda.get_device_properties(0).name)[1]
    return tuple(Node(device, size, link) for size in sizes), network


def local_gpu(index: int) -> tuple[Device, Link]:
    """Return a GPU of this machine, with the memory that it has, and its link to the others."""
    properties = torch.cuda.get_device_properties(index)
    name = properties.name
    device = known_gpu(name) or measure_gpu(torch.device("cuda", index), name)
    memory = float(properties.total_memory)
    return replace(device, memory=memory, reserve=gpu_reserve(memory)), gpu_links(name)[0]


def gpu_links(name: str) -> tuple[Link, Link]:
    """Return the link of each GPU inside its node, and the network between nodes."""
    over_pcie = "pcie" in name.lower() or "nvl" in name.lower()
    machine = next((machine for kind, machine in MACHINES.items() if kind in name), None)
    if over_pcie or machine is None:
        return B200_LINK if "B200" in name and not over_pcie else PCIE, NETWORK
    node, network = preset(machine)
    return node.link, network


def known_gpu(name: str) -> Device | None:
    """Return the device that torch calls `name`; None if no data sheet names it."""
    parts = name.lower().replace("-", " ").split()
    for words, device in _KNOWN_GPUS:
        if set(words.lower().split()) <= set(parts) and "laptop" not in parts:
            return device
    return None


@lru_cache
def measure_gpu(device: torch.device, name: str) -> Device:
    """Measure a device: rates of large work, and the time to start an operator."""
    size = 4096 if device.type == "cuda" else 256
    flops = {}
    for key in ("f64", "f32", "f16", "bf16"):
        half = 2 if key == "f64" else 1
        matrix = torch.randn(size // half, size // half, device=device).to(DTYPES[key])
        flops[key] = 2 * (size // half) ** 3 / median_seconds(lambda m=matrix: m @ m, device)  # type: ignore[misc]
    large = torch.randn((1 << 27 if device.type == "cuda" else 1 << 22) // 4, device=device)
    copy = torch.empty_like(large)
    bandwidth = 2 * large.nbytes / median_seconds(lambda: copy.copy_(large), device)
    small = torch.ones(1, device=device)
    overhead = median_seconds(lambda: [small + small for _ in range(100)], device) / 100
    is_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else host_memory()
    further: dict[str, Any] = {"overhead": overhead, "host": measure_host(device), **REACHED}
    return Device(name, flops, float(memory), bandwidth, **further)


def measure_host(device: torch.device) -> Host:
    """Measure the bandwidth of copies between pinned memory and a device."""
    is_gpu = device.type == "cuda"
    on_host = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=is_gpu)
    on_device = torch.empty_like(on_host, device=device)
    small, large = (
        median_seconds(lambda n=n: on_device[:n].copy_(on_host[:n], non_blocking=True), device)  # type: ignore[misc]
        for n in (1, len(on_host))
    )
    bandwidth = len(on_host) / max(large - small, large / 2)
    return Host(host_memory(), small, bandwidth, is_device=not is_gpu)


def median_seconds(
    work: Callable[[], object], device: torch.device, runs: int = 10, warm: int = 3
) -> float:
    """Return the median seconds of `work` on a device, after `warm` runs that load and tune."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for run in range(runs + warm):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if run >= warm:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
