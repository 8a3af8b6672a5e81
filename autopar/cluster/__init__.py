"""The machines: devices, links and nodes, known by name, measured, or read from a file.

Read `machines` (device, host, link, node), then `cluster`, then `links` (bandwidth that groups of
ranks share). Figures come from `presets`, `gpus`, `cluster_file`, or from `calibration`, which runs
`measure`; `pace` corrects them by measured steps. `cluster_part` is a cluster as one pipeline stage
has it; `nested_groups`, the ranks of a group that share nodes and racks.
"""

from autopar.cluster.cluster import Cluster
from autopar.cluster.machines import AxisLink, Device, Host, Level, Link, Node

__all__ = ["AxisLink", "Cluster", "Device", "Host", "Level", "Link", "Node"]
