"""Modules whose parallel forms autopar knows; each runs on one device as it is."""

from autopar.nn.moe import MoE

__all__ = ["MoE"]
