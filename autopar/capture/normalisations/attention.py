"""Attention masks that say nothing, or only "causal", become flags of the operator."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, shape_of
from autopar.capture.normalisations.constants import Evaluator
from autopar.strategies import OperatorCall

aten = torch.ops.aten

SDPA = aten.scaled_dot_product_attention.default


def recognise_masks(builder: GraphBuilder) -> None:
    """A mask proved to be all true is dropped; one proved to be causal becomes is_causal."""
    evaluator = Evaluator(builder)
    kinds: dict[tuple[fx.Node, int, int], str | None] = {}
    for node in builder.calls(SDPA):
        query, key, value, mask, dropout, causal, *rest = OperatorCall(node).arguments.values()
        if isinstance(mask, fx.Node) and evaluator.is_constant(mask):
            size = shape_of(query)[-2], shape_of(key)[-2]
            if (mask, *size) not in kinds:
                kinds[mask, *size] = evaluator.ask(mask, partial(_kind, sizes=size))
            kind = kinds[mask, *size]
            if kind is not None:
                mask, causal = None, kind == "causal"
        node.args = (query, key, value, mask, dropout, causal)
        given = zip(("scale", "enable_gqa"), rest)
        node.kwargs = {name: v for name, v in given if v is not None and v is not False}


def _kind(mask: torch.Tensor, sizes: tuple[int, int]) -> str | None:
    """ "full", "causal" or None, from the values of a mask for each query and key."""
    queries, keys = sizes
    if mask.ndim < 2:
        return None
    for dim in range(mask.ndim - 2):
        if mask.stride(dim) != 0 and mask.shape[dim] > 1:
            return None
        mask = mask.narrow(dim, 0, 1)
    mask = mask.reshape(mask.shape[-2:]).expand(queries, keys)
    if mask.dtype != torch.bool:
        seen = mask == 0
        lowest = torch.finfo(mask.dtype).min if mask.dtype.is_floating_point else 0
        if not bool((seen | (mask <= lowest / 2)).all()):
            return None
        mask = seen
    if bool(mask.all()):
        return "full"
    causal = queries > 1 and torch.equal(mask, torch.ones_like(mask).tril())
    return "causal" if causal else None
