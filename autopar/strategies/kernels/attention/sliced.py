"""Causal attention of one slice of a sequence, whose slices come one after another.

    slice 0    q0 ─▶ k0                 forward: writes its keys and values behind those of
    slice 1    q1 ─▶ k0 k1              earlier slices, and attends to all of them
    slice 2    q2 ─▶ k0 k1 k2           backward, from the last slice to the first: adds up the
                                        gradients of all these keys, and takes those of its own

Keys, values and their gradients lie in four tensors of the whole sequence, which its slices share.
When the backward of a slice runs, those of all later slices have: its keys' gradient is complete.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.strategies.kernels.attention.attention_blocks import (
    AttentionBlock,
    AttentionOptions,
    RowResults,
    attend,
    block_gradients,
    empty_results,
    grouped,
    merge,
    ungrouped,
    wide_of,
    with_groups,
)
from autopar.strategies.kernels.keyed_draws import DrawPlace


class SequenceTensors(NamedTuple):
    """The keys and values of a sequence, as far as its slices have come, and their gradients."""

    keys: Tensor
    values: Tensor
    key_gradients: Tensor
    value_gradients: Tensor


def sliced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    key_gradients: Tensor,
    value_gradients: Tensor,
    drawn: Tensor | None,
    place: DrawPlace | None,
    dropout_p: float,
    offset: int,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return causal attention of the tokens from `offset` on to these and all before.

    `drawn`, `place`: the key of the dropout of weights, and its place in the whole; None: none.
    """
    is_grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    groups = query.shape[-3] // key.shape[-3] if is_grouped else 1
    options = AttentionOptions(
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        True,
        None if place is None else with_groups(place, groups),
        dropout_p,
    )
    sequence = SequenceTensors(keys, values, key_gradients, value_gradients)
    output = _SlicedAttention.apply(
        grouped(query, groups), key, value, drawn, sequence, options, offset
    )
    return ungrouped(output, is_grouped=is_grouped)


class _SlicedAttention(torch.autograd.Function):
    """Attention in two blocks: to all tokens before the slice, and to its own."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        drawn: Tensor | None,
        sequence: SequenceTensors,
        options: AttentionOptions,
        offset: int,
    ) -> Tensor:
        end = offset + key.shape[-2]
        # Earlier slices have read other rows: what they keep does not become another version.
        for whole, piece in zip(sequence, (key, value)):
            whole.data[..., offset:end, :] = piece
        ctx.sequence, ctx.options, ctx.offset = sequence, options, offset
        blocks = _blocks(query, drawn, sequence, offset)
        output, sums = attend(blocks[-1], options)
        if len(blocks) > 1:
            wide, before = wide_of(query.dtype), blocks[0]
            total, total_sums = empty_results(before, wide)
            for other, other_sums in (attend(before, options), (output, sums)):
                merge(total, total_sums, other, other_sums)
            output, sums = total, total_sums
        output = output.to(query.dtype)
        ctx.save_for_backward(query, drawn, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        query, drawn, output, sums = ctx.saved_tensors
        sequence: SequenceTensors = ctx.sequence
        whole = RowResults(output, sums, slope)
        of_query = torch.zeros_like(query, dtype=wide_of(query.dtype))
        for block in _blocks(query, drawn, sequence, ctx.offset):
            gradients = block_gradients(block, ctx.options, whole)
            of_query += gradients.query
            rows = slice(block.column, block.column + block.columns)
            sequence.key_gradients.data[..., rows, :] += gradients.key
            sequence.value_gradients.data[..., rows, :] += gradients.value
        rows = slice(ctx.offset, ctx.offset + query.shape[-2])
        of_key, of_value = (
            of_sequence[..., rows, :].to(query.dtype, copy=True)
            for of_sequence in (sequence.key_gradients, sequence.value_gradients)
        )
        return of_query.to(query.dtype), of_key, of_value, None, None, None, None


def _blocks(
    query: Tensor, drawn: Tensor | None, sequence: SequenceTensors, offset: int
) -> list[AttentionBlock]:
    """Return the blocks of keys that a slice attends to: those before it, if any, and its own."""
    end = offset + query.shape[-2]
    parts = [slice(0, offset), slice(offset, end)] if offset else [slice(0, end)]
    return [
        AttentionBlock(
            query,
            sequence.keys[..., rows, :],
            sequence.values[..., rows, :],
            offset,
            rows.start,
            drawn=drawn,
        )
        for rows in parts
    ]
