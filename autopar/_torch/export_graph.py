"""Private facts of `torch.export`: the graph that it is making, its verifier and declared dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor

# What `torch.export` loads when it is first called: most of the seconds of a first capture.
LOADED_BY_EXPORT = ("torch._dynamo", "torch.export._trace", "torch.export._unlift")


def export_verifier() -> Any:
    """Return the module by which export checks its own graphs."""
    from torch._export import verifier

    return verifier


class FlexAttentionParts(NamedTuple):
    """The functions that FlexAttention is made of."""

    attention: Callable[..., Any]
    indexing: Any  # the mode in which functions of a mask read captured tensors
    mapped: Callable[..., Any]  # what maps them over batch, head, query and key


def flex_attention_parts() -> FlexAttentionParts:
    """Return the functions that FlexAttention is made of; the call loads torch's compiler."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    return FlexAttentionParts(math_attention, TransformGetItemToIndex, _vmap_for_bhqkv)


def is_exporting() -> bool:
    """Return whether export is making a graph of what runs."""
    return proxy_tensor.get_proxy_mode() is not None


def traced_node(tensor: Tensor) -> tuple[fx.Node | None, nn.Module]:
    """Return a tensor's node in the graph that export is making, and the holder of its constants.

    The node is None for a tensor that the graph does not know.
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None, nn.Module()
    node = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy.node)
    return node, getattr(mode.tracer, "root", nn.Module())


class DeclaredDim(NamedTuple):
    """A dim whose size varies, as a user declares it: `times` the size of `root`, and `plus`."""

    root: str
    times: int
    plus: int
    least: int  # of the root
    most: int | None


def declared_dim(entry: Any, where: str) -> DeclaredDim | None:
    """Read a `torch.export.Dim`, one that is derived of another, or a hint.

    The hints `Dim.DYNAMIC` and `Dim.AUTO` name no root, so it is named `where` they stand.
    `Dim.STATIC` gives None.
    """
    named = torch.export.Dim
    if isinstance(entry, type(named.AUTO)):
        if entry.type.name == "STATIC":
            return None
        return DeclaredDim(where, 1, 0, entry.min or 0, entry.max)
    if not isinstance(entry, named):
        raise TypeError(f"{type(entry).__name__} is no dim")
    root = getattr(entry, "root", entry)
    at_0, at_1 = (entry.fn(0), entry.fn(1)) if root is not entry else (0, 1)  # type: ignore[attr-defined]
    most = root.max if isinstance(root.max, int) else None  # else torch's infinity
    return DeclaredDim(root.__name__, at_1 - at_0, at_0, root.min, most)
