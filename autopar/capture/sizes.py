"""Sizes: the batch and the sequence of a call's inputs, and the same call with others.

    sizes = sizes_of(captured)                            # Sizes(batch=32, sequence=1024)
    args, kwargs = resized(args, kwargs, sizes, Sizes(32, 2048))

The batch is the first dim. A sequence is the second, where the program says so: of whole numbers
that look up rows, as tokens do, or of three dims of others, as of their embeddings; and nothing
that the model has learned is summed along it, as along features. Every dim of an input that has one
of these sizes follows it. Values do not matter: nothing but a shape is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.listing import operator_name
from autopar.capture.marker import ANNOTATE
from autopar.capture.origins import is_of_parameters
from autopar.strategies import Rule, tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import result_index, values_of

_LOOK_UP = ("embedding", "embedding_bag", "index", "index_select", "one_hot")


@dataclass(frozen=True)
class Sizes:
    """Of the inputs of a call; None: they have no such dim."""

    batch: int | None = None
    sequence: int | None = None


def sizes_of(captured: Captured) -> Sizes:
    """Those of the first input that has them."""
    batch = rows_of(captured.example.args, captured.example.kwargs)
    inputs = {name for name in captured.inputs if name is not None}
    found = (node for node in captured.graph.nodes if node.name in inputs)
    lengths = (info(node).val.shape[1] for node in found if _has_sequence(node, batch, captured))
    return Sizes(batch, next((int(length) for length in lengths), None))


def rows_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The batch of a call."""
    return next((int(value.shape[0]) for value in _tensors(args, kwargs) if value.ndim), None)


def resized(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], now: Sizes, wanted: Sizes
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The call with other sizes, of tensors without values."""

    def changed(value: Tensor) -> Tensor:
        shape = [int(size) for size in value.shape]
        # Of what has a sequence as its second dim, a third of that size is of something else.
        last = 2 if _may_have_sequence(value) and value.is_floating_point() else len(shape)
        for dim, size in enumerate(shape):
            if dim == 0 and size == now.batch:
                shape[0] = wanted.batch or size
            elif dim < last and size == now.sequence:
                shape[dim] = wanted.sequence or size
        made = torch.empty(shape, dtype=value.dtype, device="meta")
        return made.requires_grad_(value.requires_grad)

    return pytree.tree_map_only(Tensor, changed, (args, dict(kwargs)))


def _may_have_sequence(value: Tensor) -> bool:
    return value.ndim == 3 if value.is_floating_point() else value.ndim >= 2


def _has_sequence(source: fx.Node, batch: int | None, captured: Captured) -> bool:
    """Whether the second dim of an input is one, by what reads it."""
    given = info(source).val
    if not _may_have_sequence(given) or given.shape[0] != batch:
        return False
    dims: dict[fx.Node, set[int]] = {source: {1}}
    is_looked_up = given.is_floating_point()
    for call in captured.operators:
        read = [(at, one) for at, one in enumerate(tensor_inputs(call)) if one in dims]
        if not read:
            continue
        if call.target is ANNOTATE:
            dims[call] = dims[read[0][1]]
            continue
        rule = captured.rules[call.name]
        if rule is None:  # what becomes of it is not known
            continue
        factors = {f for at, one in read for dim in dims[one] for f in rule.inputs[at][dim]}
        if _sums_learned(call, rule, factors, captured):
            return False
        is_looked_up |= operator_name(call.target) in _LOOK_UP and any(
            not info(one).val.dtype.is_floating_point for _, one in read
        )
        for value in values_of(call):
            of_value = rule.outputs[result_index(value)]
            found = {dim for dim, group in enumerate(of_value) if factors & {*group}}
            if not found and len(rule.inputs) == 1 and len(of_value) == len(rule.inputs[0]):
                found = dims[read[0][1]]  # as of a slice, which is of another length
            if found:
                dims[value] = found
    return is_looked_up


def _sums_learned(call: fx.Node, rule: Rule, factors: set[str], captured: Captured) -> bool:
    """Whether a call sums products with what was learned along some factors."""
    left = factors - {f for dims in rule.outputs for group in dims for f in group}
    return any(
        is_of_parameters(value, captured)
        for value, dims in zip(tensor_inputs(call), rule.inputs)
        if any(left & {*group} for group in dims)
    )


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))
