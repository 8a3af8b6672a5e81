"""Attention with dropout of its weights: some rows at a time, which backward computes again.

Neither weights nor draws are kept: random bits follow from their places (`keyed_draws.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.collectives.single_backward import forbid_double_grad
from autopar.strategies.kernels.keyed_draws import (
    DrawPlace,
    columns_of,
    draw_elements,
    element_numbers,
    keep_scale,
    rows_of,
)

_SCORES = {"cpu": 2**20}  # at a time, by kind of device: what stays in a cache
_MANY = 2**26  # on an accelerator, which computes so many at once: 256 MiB in float32
_ROWS = 256  # of a head at a time, where what they see grows from row to row


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    drawn: Tensor,
    place: DrawPlace,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return scaled dot product attention, with dropout of its weights by the key `drawn`."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if attn_mask is not None and attn_mask.ndim == 1:
        attn_mask = attn_mask.unsqueeze(0)
    is_grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    if is_grouped:
        groups = key.shape[-3], query.shape[-3] // key.shape[-3]
        query, key, value = query.unflatten(-3, groups), key.unsqueeze(-3), value.unsqueeze(-3)
        if attn_mask is not None and attn_mask.ndim > 2:
            is_each = attn_mask.shape[-3] > 1
            attn_mask = attn_mask.unflatten(-3, groups) if is_each else attn_mask.unsqueeze(-3)
        place = place.unflattened(len(place.shape) - 3, groups[1])
    weights = _DroppedWeights(place, dropout_p, is_causal, scale)
    output = _Attention.apply(query, key, value, attn_mask, drawn, weights)
    return output.flatten(-4, -3) if is_grouped else output


class _Attention(torch.autograd.Function):
    """Attention by some rows of the weights at a time, which backward computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        drawn: Tensor,
        weights: _DroppedWeights,
    ) -> Tensor:
        heads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        out = query.new_empty(*heads, query.shape[-2], value.shape[-1])
        flat = out.view(math.prod(heads), *out.shape[-2:])
        for part in weights.parts(query, key, value, mask, drawn, heads):
            weighted = part.weights.mul_(part.dropout_mask).to(value.dtype)
            flat[part.heads, part.rows] = torch.bmm(weighted, part.value).mul_(
                keep_scale(weights.p)
            )
        ctx.save_for_backward(query, key, value, mask, drawn, out)
        ctx.weights = weights
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _Attention._gradients(ctx, grad)
        read = tuple(x for x in ctx.saved_tensors[:4] if x is not None)
        remedy = "a dropout of 0 in it, or attention that is written as its parts"
        return (
            *forbid_double_grad(gradients, read, [grad], "attention with dropout", remedy),
            None,
            None,
        )

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, drawn, out = ctx.saved_tensors
        weights, heads = ctx.weights, out.shape[:-2]
        of_query, of_key, of_value = (
            x.new_zeros(math.prod(heads), *x.shape[-2:]) for x in (query, key, value)
        )
        of_mask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        shared = (grad * out).sum(-1, keepdim=True).reshape(math.prod(heads), grad.shape[-2], 1)
        slopes = (grad * keep_scale(weights.p)).reshape(math.prod(heads), *grad.shape[-2:])
        for part in weights.parts(query, key, value, mask, drawn, heads):
            slope, keys = slopes[part.heads, part.rows], part.key.shape[-2]
            wide = part.weights.dtype
            weighted = (part.weights * part.dropout_mask).to(value.dtype)
            of_value[part.heads, :keys].baddbmm_(weighted.transpose(1, 2), slope)
            of_scores = torch.bmm(slope, part.value.transpose(1, 2)).to(wide)
            of_scores.mul_(part.dropout_mask).sub_(shared[part.heads, part.rows])
            of_scores.mul_(part.weights)
            if of_mask is not None:
                _add_to(of_mask, heads, part, of_scores)
            of_scores = of_scores.to(query.dtype)
            of_query[part.heads, part.rows] = torch.bmm(of_scores, part.key)
            of_key[part.heads, :keys].baddbmm_(of_scores.transpose(1, 2), part.query)
        of_query.mul_(weights.scale)
        pairs = zip((of_query, of_key, of_value), (query, key, value))
        sums = (of_x.view(*heads, *of_x.shape[1:]).sum_to_size(x.shape) for of_x, x in pairs)
        return *sums, of_mask


@dataclass(frozen=True)
class _WeightBlock:
    """Some rows of the weights of some heads, with the tensors that they are computed from."""

    heads: slice
    rows: slice
    query: Tensor  # scaled
    key: Tensor  # the visible ones
    value: Tensor
    weights: Tensor  # as softmax gives them
    dropout_mask: Tensor  # 1: kept, or 0: a host multiplies many times faster than it selects


@dataclass(frozen=True)
class _DroppedWeights:
    """The weights of attention with dropout, computed some rows at a time."""

    place: DrawPlace
    p: float
    is_causal: bool
    scale: float

    def parts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        drawn: Tensor,
        heads: Sequence[int],
    ) -> Iterator[_WeightBlock]:
        """Yield all weights, some rows at a time."""
        queries, keys = query.shape[-2], key.shape[-2]
        query, key, value = (
            x.expand(*heads, *x.shape[-2:]).reshape(math.prod(heads), *x.shape[-2:])
            for x in (query, key, value)
        )
        place, shape = self.place, (*heads, queries, keys)
        order = element_numbers(drawn, place, len(heads), queries)
        is_in_order = place.batch is None or place.batch[0] != len(heads)
        first = place.starts[len(heads)] if len(place.starts) > len(heads) else 0
        hashes = rows_of(drawn, place, shape, 0).view(math.prod(heads), queries)
        columns, numbers = columns_of(drawn, place, shape), torch.arange(keys, device=key.device)
        most = max(round(self.p * 2**32) - 1, 0) - 2**31

        def is_more(bits: Tensor) -> Tensor:
            return bits.gt_(most)  # in place, without bools, it is made by vectors

        most_scores = _SCORES.get(query.device.type, _MANY)
        rows = max(1, min(queries, _ROWS if self.is_causal else most_scores // max(keys, 1)))
        many = max(1, most_scores // max(rows * keys, 1))
        wide = torch.promote_types(query.dtype, torch.float32)
        for head in range(0, len(query), many):
            for row in range(0, queries, rows):
                at, of = slice(head, head + many), slice(row, min(row + rows, queries))
                is_short = self.is_causal and is_in_order
                seen = min(keys, first + of.stop) if is_short else keys
                part = query[at, of] * self.scale
                scores = torch.bmm(part, key[at, :seen].transpose(1, 2)).to(wide)
                if mask is not None:
                    local = _mask_rows(mask, heads, at, of)
                    scores.add_(_hidden(~local, wide) if local.dtype == torch.bool else local)
                if self.is_causal:
                    is_later = numbers[:seen] > order[of].unsqueeze(-1)
                    scores.add_(_hidden(is_later, wide))
                weights = scores.softmax(-1)
                if mask is not None:  # rows that see nothing
                    weights.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
                dropout_mask = draw_elements(
                    hashes[at, of].reshape(-1), columns[:seen], is_more, wide
                )
                dropout_mask = dropout_mask.view(weights.shape)
                yield _WeightBlock(
                    at, of, part, key[at, :seen], value[at, :seen], weights, dropout_mask
                )


def _hidden(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return minus infinity for hidden scores, to be added, else 0."""
    return torch.zeros_like(is_hidden, dtype=dtype).masked_fill_(is_hidden, -math.inf)


def _mask_rows(mask: Tensor, heads: Sequence[int], at: slice, rows: slice) -> Tensor:
    """Return the rows of a mask for some heads."""
    local = mask[_head_indices(mask, heads, at)] if mask.ndim > 2 else mask
    return local[..., rows, :] if local.shape[-2] > 1 else local


def _add_to(of_mask: Tensor, heads: Sequence[int], part: _WeightBlock, of_scores: Tensor) -> None:
    """Add the gradients of scores where a mask was added to them."""
    into = of_mask[..., part.rows, :] if of_mask.shape[-2] > 1 else of_mask
    terms = of_scores.to(into.dtype)
    if into.ndim > 2:
        indices = _head_indices(into, heads, part.heads)
        into.index_put_(indices, terms.sum_to_size(len(terms), *into.shape[-2:]), accumulate=True)
    else:
        into += terms.sum_to_size(into.shape)


def _head_indices(mask: Tensor, heads: Sequence[int], at: slice) -> tuple[Tensor, ...]:
    """Return the indices of some of all heads in the first dims of a mask."""
    number = torch.arange(*at.indices(math.prod(heads)), device=mask.device)
    indices: list[Tensor] = []
    for length, size in zip(reversed(mask.shape[:-2]), reversed(heads)):
        indices.insert(0, number % size if length > 1 else torch.zeros_like(number))
        number = number // size
    return tuple(indices)
