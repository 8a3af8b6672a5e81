"""Sizes: the batch and the sequence of a call's inputs, and the same call with others.

    sizes = sizes_of(args, kwargs)                        # Sizes(batch=32, sequence=1024)
    args, kwargs = resized(args, kwargs, Sizes(32, 2048))

The batch is the first dim. What has a sequence has it as the second: whole numbers of two dims or
more, as tokens, and others of three, as their embeddings. Every dim of an input that has one of
these sizes follows it. Values do not matter: nothing but a shape is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Sizes:
    """Of the inputs of a call; None: they have no such dim."""

    batch: int | None = None
    sequence: int | None = None


def sizes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """Those of the first input that has them."""
    tensors = list(_tensors(args, kwargs))
    batch = next((int(value.shape[0]) for value in tensors if value.ndim), None)
    lengths = (int(v.shape[1]) for v in tensors if _is_sequence(v) and v.shape[0] == batch)
    return Sizes(batch, next(lengths, None))


def resized(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Sizes
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The call with other sizes, of tensors without values."""
    now = sizes_of(args, kwargs)

    def changed(value: Tensor) -> Tensor:
        shape = [int(size) for size in value.shape]
        # Of what has a sequence as its second dim, a third of that size is of something else.
        last = 2 if _is_sequence(value) and value.is_floating_point() else len(shape)
        for dim, size in enumerate(shape):
            if dim == 0 and size == now.batch:
                shape[0] = wanted.batch or size
            elif dim < last and size == now.sequence:
                shape[dim] = wanted.sequence or size
        made = torch.empty(shape, dtype=value.dtype, device="meta")
        return made.requires_grad_(value.requires_grad)

    return pytree.tree_map_only(Tensor, changed, (args, dict(kwargs)))


def _is_sequence(value: Tensor) -> bool:
    return value.ndim == 3 if value.is_floating_point() else value.ndim >= 2


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))
