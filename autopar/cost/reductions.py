"""Reductions of the gradients of activations that run beside the gradients of weights.

Where the backward of a movement is a reduction, and linears alone read what it gives, the gradients
of their weights do not wait for it: `passes/reductions.py` lets them be made meanwhile.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.strategies.node_info import info

aten = torch.ops.aten


def linears_behind(movement: fx.Node) -> list[fx.Node]:
    """The linears whose weights' gradients are made beside the backward of a movement, a reduction;
    none where there is nothing of the kind, or other readers."""
    moved, readers = info(movement).movement, list(movement.users)
    is_reduction = moved is not None and (moved.kind == "identity" or moved.pending)
    if not is_reduction or not info(movement).differentiable:
        return []
    if not all(_is_linear_of(reader, movement) for reader in readers):
        return []
    learns = any(info(weight_of(reader)).differentiable for reader in readers)
    return readers if learns else []


def weight_of(linear: fx.Node) -> fx.Node:
    return linear.args[1]  # type: ignore[return-value]


def _is_linear_of(reader: fx.Node, value: fx.Node) -> bool:
    region = info(value).region
    if region is not None and not region.is_full and (info(value).remade or info(reader).remade):
        return False
    return (
        reader.target is aten.linear.default
        and not reader.kwargs
        and reader.args[0] is value
        and value not in reader.args[1:]
        and info(reader).region == region
    )
