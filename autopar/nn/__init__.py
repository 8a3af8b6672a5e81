"""Modules and functions whose parallel forms autopar knows; each runs on one device as it is."""

from autopar.nn.moe import MoE
from autopar.nn.scan import linear_scan

__all__ = ["MoE", "linear_scan"]
