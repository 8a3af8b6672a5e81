"""Attention of some queries to some keys: what it adds to whole rows, and its gradients.

A block gives its output and, for each row, the logarithm of the sum that its weights are divided
by: from these, several blocks of the same rows are put together (`merged`). Given those of whole
rows, a block makes its weights again, and every gradient is a sum over blocks. torch's fused
kernels do both where they can; else it is some rows and columns at a time.

Queries are [..., groups, rows, d] for keys [..., columns, d], which all groups read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.strategies.kernels.keyed_draws import (
    DrawPlace,
    columns_of,
    draw_elements,
    keep_scale,
    rows_of,
)

_SCORES = {"cpu": 2**20}  # at a time, by kind of device: what stays in a cache
_MANY = 2**26
aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionOptions:
    """How scores become weights."""

    scale: float
    is_causal: bool = False  # by the numbers of rows and columns in the whole
    place: DrawPlace | None = None  # of all weights, [..., groups, rows, columns], some are dropped
    p: float = 0.0


@dataclass(frozen=True)
class AttentionBlock:
    """Some queries, keys and values, and where they are in the whole."""

    query: Tensor
    key: Tensor
    value: Tensor
    row: int
    column: int
    mask: Tensor | None = None  # [..., groups, rows, columns], any of them 1
    drawn: Tensor | None = None  # the key by which weights are dropped

    @property
    def rows(self) -> int:
        return self.query.shape[-2]

    @property
    def columns(self) -> int:
        return self.key.shape[-2]

    @property
    def heads(self) -> tuple[int, ...]:
        """The leading dims of the output."""
        *queries, groups = self.query.shape[:-2]
        keys, values = self.key.shape[:-2], self.value.shape[:-2]
        return (*torch.broadcast_shapes(queries, keys, values), groups)

    def sees(self, weights: AttentionOptions) -> bool:
        """Whether some row sees some column."""
        is_later = weights.is_causal and self.column >= self.row + self.rows
        return self.rows > 0 and self.columns > 0 and not is_later

    def sees_all(self, weights: AttentionOptions) -> bool:
        return not weights.is_causal or self.column + self.columns - 1 <= self.row

    def part(self, rows: slice, columns: slice) -> AttentionBlock:
        return replace(
            self,
            query=self.query[..., rows, :],
            key=self.key[..., columns, :],
            value=self.value[..., columns, :],
            row=self.row + rows.start,
            column=self.column + columns.start,
            mask=None if self.mask is None else cut_mask(self.mask, rows, columns),
        )

    def parts(self, weights: AttentionOptions) -> Iterator[tuple[slice, slice, AttentionBlock]]:
        """Some rows and columns at a time, those that are seen."""
        most = _SCORES.get(self.query.device.type, _MANY) // max(math.prod(self.heads), 1)
        side = max(math.isqrt(most), 1)
        for row in range(0, self.rows, side):
            for column in range(0, self.columns, side):
                rows = slice(row, min(row + side, self.rows))
                columns = slice(column, min(column + side, self.columns))
                part = self.part(rows, columns)
                if part.sees(weights):
                    yield rows, columns, part
                    if self.query.is_meta:  # whoever counts memory has seen the largest
                        return


class RowResults(NamedTuple):
    """What all blocks together gave for some rows, and the gradient of it."""

    output: Tensor
    sums: Tensor
    slope: Tensor

    def part(self, rows: slice) -> RowResults:
        return RowResults(*(x[..., rows, :] for x in self))


class AttentionGradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """In what sums are taken."""
    return torch.promote_types(dtype, torch.float32)


def cut_mask(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """Some rows and columns of a mask, or of its gradient."""
    mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    return mask[..., columns] if mask.shape[-1] > 1 else mask


def attend(block: AttentionBlock, weights: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The output of a block, and the logarithms of its sums."""
    if _is_fused(block, weights):
        return _fused(block, weights)
    wide = wide_of(block.query.dtype)
    output, sums = empty_results(block, wide)
    for rows, _, part in block.parts(weights):
        scores = _scores(part, weights)
        own = scores.logsumexp(-1, keepdim=True)
        used = _dropped(_weighted(scores, own), part, weights)
        merge(output[..., rows, :], sums[..., rows, :], _times(used, part.value), own)
    return output, sums


def empty_results(block: AttentionBlock, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What rows have before the first block is merged."""
    shape = *block.heads, block.rows
    output = block.query.new_zeros(*shape, block.value.shape[-1], dtype=dtype)
    return output, block.query.new_full((*shape, 1), -math.inf, dtype=dtype)


def merge(output: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Put another block of the same rows to what they have."""
    total = torch.logaddexp(sums, other_sums)
    output.mul_(_weighted(sums, total)).add_(other * _weighted(other_sums, total))
    sums.copy_(total)


def block_gradients(
    block: AttentionBlock,
    weights: AttentionOptions,
    whole: RowResults,
    of_mask: Tensor | None = None,
) -> AttentionGradients:
    """What a block adds to gradients. That of the mask is added to `of_mask`."""
    if of_mask is None and _is_fused(block, weights):
        return _fused_slopes(block, weights, whole)
    inputs, wide = (block.query, block.key, block.value), wide_of(block.query.dtype)
    found = AttentionGradients(*(torch.zeros_like(x, dtype=wide) for x in inputs))
    for rows, columns, part in block.parts(weights):
        output, sums, slope = whole.part(rows)
        slope = slope.to(wide)
        used = _weighted(_scores(part, weights), sums)
        of_used = _dropped(_times(slope, part.value.mT), part, weights)
        of_scores = used * (of_used - (slope * output).sum(-1, keepdim=True))
        if of_mask is not None:
            _add(cut_mask(of_mask, rows, columns), of_scores)
        of_scores = of_scores * weights.scale
        _add(found.query[..., rows, :], _times(of_scores, part.key))
        _add(found.key[..., columns, :], _over_rows(of_scores, part.query))
        _add(found.value[..., columns, :], _over_rows(_dropped(used, part, weights), slope))
    return found


def _scores(block: AttentionBlock, weights: AttentionOptions) -> Tensor:
    query = block.query.to(wide_of(block.query.dtype))
    scores = _times(query, block.key.mT) * weights.scale
    if block.mask is not None and block.mask.dtype == torch.bool:
        scores = scores.masked_fill(~block.mask, -math.inf)
    elif block.mask is not None:
        scores = scores + block.mask
    if not block.sees_all(weights):
        rows, columns = (
            torch.arange(start, start + count, device=query.device)
            for start, count in ((block.row, block.rows), (block.column, block.columns))
        )
        scores = scores.masked_fill(columns > rows.unsqueeze(-1), -math.inf)
    return scores


def _weighted(scores: Tensor, sums: Tensor) -> Tensor:
    """The weights; those of rows that see nothing are 0."""
    return torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0))


def _dropped(weights: Tensor, block: AttentionBlock, how: AttentionOptions) -> Tensor:
    """Weights, or their gradient, some of them dropped by their places."""
    if how.place is None or block.drawn is None:
        return weights
    place = how.place._replace(starts=(*how.place.starts[:-2], block.row, block.column))
    most = max(round(how.p * 2**32) - 1, 0) - 2**31
    kept = draw_elements(
        rows_of(block.drawn, place, weights.shape, 0),
        columns_of(block.drawn, place, weights.shape),
        lambda bits: bits.gt_(most),
        weights.dtype,
    )
    return weights * kept.view(weights.shape) * keep_scale(how.p)


def _times(rows: Tensor, other: Tensor) -> Tensor:
    """Rows of all groups times what is one for all of them."""
    product = rows.flatten(-3, -2) @ other.to(rows.dtype)
    return product.unflatten(-2, rows.shape[-3:-1])


def _over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """The sum over rows of all groups."""
    return weights.flatten(-3, -2).mT @ rows.flatten(-3, -2).to(weights.dtype)


def _add(into: Tensor, found: Tensor) -> None:
    into += found.sum_to_size(into.shape)


def _is_fused(block: AttentionBlock, weights: AttentionOptions) -> bool:
    """Whether torch has a kernel for a block, which gives its sums."""
    query, key, value = block.query, block.key, block.value
    if block.mask is not None or weights.place is not None or query.ndim != 5:
        return False
    if not query.shape[:2] == key.shape[:2] == value.shape[:2] or key.shape != value.shape:
        return False
    is_square = block.row == block.column and block.rows == block.columns
    if not (is_square or block.sees_all(weights)):
        return False
    if query.device.type in ("cpu", "meta"):
        return query.numel() > 0
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and is_half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _fused(block: AttentionBlock, weights: AttentionOptions) -> tuple[Tensor, Tensor]:
    is_causal = not block.sees_all(weights)
    given = (_rows_apart(x) for x in (block.query.flatten(1, 2), block.key, block.value))
    if block.query.is_cuda:
        output, sums, *_ = aten._scaled_dot_product_flash_attention(
            *given, 0.0, is_causal, scale=weights.scale
        )
    else:
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, is_causal, scale=weights.scale
        )
    heads = block.query.shape[1:3]
    return output.unflatten(1, heads), sums.unflatten(1, heads).unsqueeze(-1)


def _fused_slopes(
    block: AttentionBlock, weights: AttentionOptions, whole: RowResults
) -> AttentionGradients:
    query, is_causal = block.query.flatten(1, 2), not block.sees_all(weights)
    output, sums, slope = (x.flatten(1, 2) for x in whole)
    rows = (_rows_apart(x) for x in (slope, query, block.key, block.value, output))
    given = *rows, sums.squeeze(-1)
    if query.is_cuda:
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
        found = aten._scaled_dot_product_flash_attention_backward(
            *(x.contiguous() for x in given),
            *(None, None, block.rows, block.columns, 0.0, is_causal, seed, seed[:0]),
            scale=weights.scale,
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, is_causal, scale=weights.scale
        )
    return AttentionGradients(found[0].unflatten(1, block.query.shape[1:3]), *found[1:])


def _rows_apart(x: Tensor) -> Tensor:
    """With the numbers of a row one after another, as the kernels read them: none of them looks."""
    return x if x.stride(-1) == 1 else x.contiguous()
