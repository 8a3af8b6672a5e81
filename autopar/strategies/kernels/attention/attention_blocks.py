"""Attention of some queries to some keys: its share of whole rows, and of gradients.

A block gives its output and, for each row, the logarithm of the sum that divides its weights: from
these, `merge` adds blocks of the same rows up. With the sums of whole rows a block computes its
weights again, and every gradient is a sum over blocks. torch's fused kernels do both where they
can; else it is some rows and columns at a time.

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
    """The options by which scores become weights."""

    scale: float
    is_causal: bool = False  # by the numbers of rows and columns in the whole
    place: DrawPlace | None = None  # of all weights, [..., groups, rows, columns]; None: no dropout
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
    drawn: Tensor | None = None  # the key of the dropout of weights

    @property
    def rows(self) -> int:
        return self.query.shape[-2]

    @property
    def columns(self) -> int:
        return self.key.shape[-2]

    @property
    def heads(self) -> tuple[int, ...]:
        """Return the leading dims of the output."""
        *queries, groups = self.query.shape[:-2]
        keys, values = self.key.shape[:-2], self.value.shape[:-2]
        return (*torch.broadcast_shapes(queries, keys, values), groups)

    def sees(self, weights: AttentionOptions) -> bool:
        """Return whether some row sees some column."""
        is_later = weights.is_causal and self.column >= self.row + self.rows
        return self.rows > 0 and self.columns > 0 and not is_later

    def sees_all(self, weights: AttentionOptions) -> bool:
        return not weights.is_causal or self.column + self.columns - 1 <= self.row

    def part(self, rows: slice, columns: slice) -> AttentionBlock:
        """Return the block of some of its rows and columns."""
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
        """Yield the block some rows and columns at a time, without parts that are not seen."""
        most = _SCORES.get(self.query.device.type, _MANY) // max(math.prod(self.heads), 1)
        side = max(math.isqrt(most), 1)
        for row in range(0, self.rows, side):
            for column in range(0, self.columns, side):
                rows = slice(row, min(row + side, self.rows))
                columns = slice(column, min(column + side, self.columns))
                part = self.part(rows, columns)
                if part.sees(weights):
                    yield rows, columns, part
                    if self.query.is_meta:  # the largest part, which is enough to count memory
                        return


class RowResults(NamedTuple):
    """The output and sums of all blocks for some rows, and the gradient of the output."""

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
    """Return the dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def cut_mask(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return some rows and columns of a mask, or of its gradient."""
    mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    return mask[..., columns] if mask.shape[-1] > 1 else mask


def grouped(x: Tensor, groups: int) -> Tensor:
    """Return heads of queries with a dim for the groups that read the same keys."""
    if groups == 1:
        return x.unsqueeze(-3)
    return x.unflatten(-3, (x.shape[-3] // groups, groups))


def ungrouped(x: Tensor, *, is_grouped: bool) -> Tensor:
    return x.flatten(-4, -3) if is_grouped else x.squeeze(-3)


def with_groups(place: DrawPlace, groups: int) -> DrawPlace:
    """Return the place of weights with a dim of groups."""
    if len(place.shape) > 2:
        return place.unflattened(len(place.shape) - 3, groups)
    batch = None if place.batch is None else (place.batch[0] + 1, place.batch[1])
    starts = (0, *place.starts, 0, 0)[:3]
    parts = (1, *place.parts) if place.parts else ()
    return place._replace(shape=(1, *place.shape), starts=starts, batch=batch, parts=parts)


def attend(block: AttentionBlock, weights: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the output of a block, and the logarithms of its sums."""
    if _is_fused(block, weights):
        return _fused(block, weights)
    wide = wide_of(block.query.dtype)
    output, sums = empty_results(block, wide)
    for rows, _, part in block.parts(weights):
        scores = _scores(part, weights)
        part_sums = scores.logsumexp(-1, keepdim=True)
        used = _dropped(_weighted(scores, part_sums), part, weights)
        merge(output[..., rows, :], sums[..., rows, :], _times(used, part.value), part_sums)
    return output, sums


def empty_results(block: AttentionBlock, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output and sums of rows before the first block is merged."""
    rows = [*block.heads, block.rows]
    output = block.query.new_zeros(*rows, block.value.shape[-1], dtype=dtype)
    return output, block.query.new_full((*rows, 1), -math.inf, dtype=dtype)


def merge(output: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Merge another block of the same rows into `output` and `sums`."""
    total = torch.logaddexp(sums, other_sums)
    output.mul_(_weighted(sums, total)).add_(other * _weighted(other_sums, total))
    sums.copy_(total)


def block_gradients(
    block: AttentionBlock,
    weights: AttentionOptions,
    whole: RowResults,
    of_mask: Tensor | None = None,
) -> AttentionGradients:
    """Return the share of a block in gradients; the mask's gradient is added to `of_mask`."""
    if of_mask is None and _is_fused(block, weights):
        return _fused_slopes(block, weights, whole)
    inputs, wide = (block.query, block.key, block.value), wide_of(block.query.dtype)
    gradients = AttentionGradients(*(torch.zeros_like(x, dtype=wide) for x in inputs))
    for rows, columns, part in block.parts(weights):
        output, sums, slope = whole.part(rows)
        slope = slope.to(wide)
        used = _weighted(_scores(part, weights), sums)
        of_used = _dropped(_times(slope, part.value.mT), part, weights)
        of_scores = used * (of_used - (slope * output).sum(-1, keepdim=True))
        if of_mask is not None:
            _add(cut_mask(of_mask, rows, columns), of_scores)
        of_scores = of_scores * weights.scale
        _add(gradients.query[..., rows, :], _times(of_scores, part.key))
        _add(gradients.key[..., columns, :], _over_rows(of_scores, part.query))
        _add(gradients.value[..., columns, :], _over_rows(_dropped(used, part, weights), slope))
    return gradients


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
    """Return the weights; those of rows that see nothing are 0."""
    return torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0))


def _dropped(weights: Tensor, block: AttentionBlock, options: AttentionOptions) -> Tensor:
    """Return weights, or their gradient, with dropout by their places."""
    if options.place is None or block.drawn is None:
        return weights
    place = options.place._replace(starts=(*options.place.starts[:-2], block.row, block.column))
    most = max(round(options.p * 2**32) - 1, 0) - 2**31
    dropout_mask = draw_elements(
        rows_of(block.drawn, place, weights.shape, 0),
        columns_of(block.drawn, place, weights.shape),
        lambda bits: bits.gt_(most),
        weights.dtype,
    )
    return weights * dropout_mask.view(weights.shape) * keep_scale(options.p)


def _times(rows: Tensor, other: Tensor) -> Tensor:
    """Return the product of rows of all groups and a matrix that groups share."""
    product = rows.flatten(-3, -2) @ other.to(rows.dtype)
    return product.unflatten(-2, rows.shape[-3:-1])


def _over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over the rows of all groups of products with weights."""
    return weights.flatten(-3, -2).mT @ rows.flatten(-3, -2).to(weights.dtype)


def _add(into: Tensor, term: Tensor) -> None:
    into += term.sum_to_size(into.shape)


def _is_fused(block: AttentionBlock, weights: AttentionOptions) -> bool:
    """Return whether torch has a fused kernel for a block, which gives its sums."""
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
    inputs = (_with_dense_rows(x) for x in (block.query.flatten(1, 2), block.key, block.value))
    if block.query.is_cuda:
        output, sums, *_ = aten._scaled_dot_product_flash_attention(
            *inputs, 0.0, is_causal, scale=weights.scale
        )
    else:
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, 0.0, is_causal, scale=weights.scale
        )
    heads = block.query.shape[1:3]
    return output.unflatten(1, heads), sums.unflatten(1, heads).unsqueeze(-1)


def _fused_slopes(
    block: AttentionBlock, weights: AttentionOptions, whole: RowResults
) -> AttentionGradients:
    query, is_causal = block.query.flatten(1, 2), not block.sees_all(weights)
    output, sums, slope = (x.flatten(1, 2) for x in whole)
    inputs = [_with_dense_rows(x) for x in (slope, query, block.key, block.value, output)]
    inputs.append(sums.squeeze(-1))
    if query.is_cuda:
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *(x.contiguous() for x in inputs),
            *(None, None, block.rows, block.columns, 0.0, is_causal, seed, seed[:0]),
            scale=weights.scale,
        )
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, is_causal, scale=weights.scale
        )
    return AttentionGradients(gradients[0].unflatten(1, block.query.shape[1:3]), *gradients[1:])


def _with_dense_rows(x: Tensor) -> Tensor:
    """Return x with rows of adjacent numbers, which the kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
