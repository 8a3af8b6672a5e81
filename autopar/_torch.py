"""The private corners of torch that autopar needs, each in one place (seen in torch 2.11 to 2.13)."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
