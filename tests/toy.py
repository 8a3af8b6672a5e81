"""Small machines by which the small models are planned in interesting ways.

>>> fast, slow = machines(bandwidth=1e12), machines(bandwidth=1e8, latency=1e-6)
"""

from __future__ import annotations

import autopar as ap
from autopar.cluster import Device, Link, Node

FAST, EVEN, SLOW = (1e12, 1e-9), (1e9, 1e-7), (1e8, 1e-6)  # bandwidth, latency


def machines(
    devices: int = 8, bandwidth: float = 1e9, latency: float = 1e-7, memory: float = 1e9
) -> ap.Cluster:
    """One node of slow devices, so that the sizes of the small models matter."""
    rates = {"f32": 1e9, "f64": 1e9}
    device = Device(
        "toy",
        rates,
        memory=memory,
        bandwidth=4e9,
        overhead=0.0,
        efficiency=1.0,
        bandwidth_efficiency=1.0,
    )
    link = Link(latency, bandwidth)
    return ap.Cluster((Node(device, devices, link),), link, "toy")
