"""Machines known by name: devices as in their data sheets, with the share of it that is reached.

>>> node, network = preset("dgx-a100")
>>> node.device.flops["bf16"] / 1e12, network.bandwidth / 1e9
(312.0, 185.0)
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cluster.machines import Device, Host, Link, Node
from autopar.errors import require_one_of

# What one device has of its host: a share of the memory and cores of such machines, and what copies
# from pinned memory reach of the 16 lanes' rate.
HOST_OF_PCIE_3 = Host(memory=64e9, copy_bandwidth=12e9, bandwidth=15e9, flops=0.2e12)
HOST_OF_PCIE_4 = Host(memory=250e9, copy_bandwidth=25e9, bandwidth=40e9, flops=0.6e12)
HOST_OF_PCIE_5 = Host(memory=250e9, copy_bandwidth=50e9, bandwidth=60e9, flops=1e12)

# What a process takes of its GPU besides tensors. A group of ranks takes buffers of NCCL: 544 MB of
# an A100 for a group of two and 688 MB for a larger one (NCCL's issue 964), less if all channels
# are not used.
CONTEXT_BYTES = 0.5e9
GROUP_BYTES = 0.5e9
GROUPS = 4  # of a rank: the world, and one for each axis of a mesh of three
FRAGMENTATION = 0.03  # of the memory: between blocks of torch's allocator


def data_sheet(
    name: str,
    rates: Mapping[str, float],
    memory: float,
    bandwidth: float,
    half_flops: float = 5,
    half_bytes: float = 4,
    host: Host = HOST_OF_PCIE_4,
    efficiency: float = 0.7,
) -> Device:
    """Return a device from figures in TFLOP/s, GB and GB/s; halves are in GFLOP and MB."""
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    efficiencies = {
        "efficiency": efficiency,
        "half_flops": half_flops * 1e9,
        "half_bytes": half_bytes * 1e6,
    }
    size = memory * 1e9
    reserve = gpu_reserve(size)
    return Device(name, flops, size, bandwidth * 1e9, **efficiencies, host=host, reserve=reserve)


def gpu_reserve(memory: float) -> float:
    """Return the bytes of a GPU that are left for what is no tensor."""
    return CONTEXT_BYTES + GROUPS * GROUP_BYTES + FRAGMENTATION * memory


def rates(f64: float, f32: float, f16: float, bf16: float | None = None) -> dict[str, float]:
    """Return rates by dtype; bf16 defaults to f16. A rate of 0 means that the dtype runs as f32."""
    given_rates = {"f64": f64, "f32": f32, "f16": f16, "bf16": f16 if bf16 is None else bf16}
    return {dtype: rate for dtype, rate in given_rates.items() if rate}


# Alone, the best products reach 268 of the 312 TFLOP/s of an A100 and 792 of the 989 of an H100
# (the table of mag-/gpu_benchmark); in a step devices are hot, and shapes as models have them. How
# short sums slow products down, and what a product takes at least, is as XLA measured it on an H100
# (its `matmul_interpolator_data.h`: 394 TFLOP/s with 256 sums, 542 with 512, 729 with 2,048).
P100 = data_sheet("P100 16 GB", rates(4.7, 9.3, 18.7, 0), 16, 732, 2, 2, HOST_OF_PCIE_3)
V100 = data_sheet("V100 32 GB", rates(7.8, 15.7, 125, 0), 32, 900, 5, 2, HOST_OF_PCIE_3)
A100 = data_sheet("A100 80 GB", rates(19.5, 19.5, 312), 80, 2039, 1, 4, efficiency=0.76)
H100 = data_sheet("H100 SXM 80 GB", rates(67, 67, 989), 80, 3350, 2, 6, HOST_OF_PCIE_5)
H200 = data_sheet("H200 141 GB", rates(67, 67, 989), 141, 4800, 2, 8, HOST_OF_PCIE_5)

# The link of each device inside its node, and all the ways out of a node taken together, as
# collectives reach them: inside, four fifths of the rate of the lines, as a protocol takes the rest
# (the maintainers of NCCL in nccl-tests, 212: 370 of 450 GB/s); outside, 23 of 25 GB/s an adapter.
# A DGX has an adapter for each device, the one with V100s one for two of them.
_PRESETS = {
    "dgx-v100": (Node(V100, 8, Link(3e-6, 120e9), rails=4), Link(6e-6, 46e9)),
    "dgx-a100": (Node(A100, 8, Link(3e-6, 235e9), rails=8), Link(6e-6, 185e9)),
    "dgx-h100": (Node(H100, 8, Link(3e-6, 370e9), rails=8), Link(6e-6, 370e9)),
    "h200": (Node(H200, 8, Link(3e-6, 370e9), rails=8), Link(6e-6, 370e9)),
    "piz-daint": (Node(P100, 1, Link(2e-6, 10e9)), Link(2e-6, 10e9)),
}
NAMES = tuple(sorted(_PRESETS))


def preset(name: str) -> tuple[Node, Link]:
    """Return one node of the machine called `name`, and the network between such nodes."""
    require_one_of("a preset", name, NAMES, "Cluster.load of your own TOML file")
    return _PRESETS[name]
