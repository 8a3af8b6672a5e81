"""The machines: devices, links and nodes, known by name, measured, or read from a file."""

from autopar.cluster.cluster import Cluster
from autopar.cluster.machines import AxisLink, Device, Host, Level, Link, Node

__all__ = ["AxisLink", "Cluster", "Device", "Host", "Level", "Link", "Node"]
