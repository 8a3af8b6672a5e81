"""Machines known by name, from their makers' data sheets.

>>> node, network = preset("dgx-a100")
>>> node.device.flops["bf16"] / 1e12, network.bandwidth / 1e9
(312.0, 200.0)
"""

from __future__ import annotations

from autopar.cluster.machines import Device, Link, Node
from autopar.errors import InvalidInput

P100 = Device(
    "P100 16 GB",
    {"f64": 4.7e12, "f32": 9.3e12, "f16": 18.7e12},
    memory=16e9,
    bandwidth=0.732e12,
    half_flops=2e9,
    half_bytes=2e6,
)
V100 = Device(
    "V100 32 GB",
    {"f64": 7.8e12, "f32": 15.7e12, "f16": 125e12},
    memory=32e9,
    bandwidth=0.9e12,
    half_flops=5e9,
    half_bytes=2e6,
)
A100 = Device(
    "A100 80 GB",
    {"f64": 19.5e12, "f32": 19.5e12, "f16": 312e12, "bf16": 312e12},
    memory=80e9,
    bandwidth=2.039e12,
    half_flops=5e9,
    half_bytes=4e6,
)
H100 = Device(
    "H100 SXM 80 GB",
    {"f64": 67e12, "f32": 67e12, "f16": 989e12, "bf16": 989e12},
    memory=80e9,
    bandwidth=3.35e12,
    half_flops=10e9,
    half_bytes=6e6,
)
H200 = Device(
    "H200 141 GB",
    {"f64": 67e12, "f32": 67e12, "f16": 989e12, "bf16": 989e12},
    memory=141e9,
    bandwidth=4.8e12,
    half_flops=10e9,
    half_bytes=8e6,
)

# The link of each device inside its node, and all the ways out of a node taken together.
_PRESETS = {
    "dgx-v100": (Node(V100, 8, Link(3e-6, 150e9)), Link(6e-6, 50e9)),
    "dgx-a100": (Node(A100, 8, Link(3e-6, 300e9)), Link(6e-6, 200e9)),
    "dgx-h100": (Node(H100, 8, Link(3e-6, 450e9)), Link(6e-6, 400e9)),
    "h200": (Node(H200, 8, Link(3e-6, 450e9)), Link(6e-6, 400e9)),
    "piz-daint": (Node(P100, 1, Link(2e-6, 10e9)), Link(2e-6, 10e9)),
}
NAMES = tuple(sorted(_PRESETS))


def preset(name: str) -> tuple[Node, Link]:
    """One node of the machine called `name`, and the network between such nodes."""
    if name not in _PRESETS:
        raise InvalidInput(
            "a preset is one of the machines known by name",
            got=repr(name),
            remedy=f"one of {', '.join(sorted(_PRESETS))}; or Cluster.load of your own TOML file",
        )
    return _PRESETS[name]
