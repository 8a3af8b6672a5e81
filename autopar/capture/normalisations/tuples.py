"""Operators with several results: every node of the captured program has one tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autopar.capture.draft import Draft, argument, shape_of
from autopar.capture.results import pick

aten = torch.ops.aten


def split_into_slices(draft: Draft) -> None:
    """split, chunk, unbind, broadcast_tensors: a slice, selection or expansion for each result."""
    for node in draft.calls():
        if isinstance(node.meta["val"], list | tuple) and node.target in _PIECES:
            pieces = _PIECES[node.target](node)
            for user in list(node.users):
                index = user.args[1]
                assert isinstance(index, int)
                with draft.graph.inserting_before(user):
                    new = draft.call(node, *pieces[index])
                draft.substitute(user, new)
            draft.graph.erase_node(node)


def _pieces_of_split(node: fx.Node) -> list[tuple[Any, ...]]:
    x = node.args[0]
    dim = argument(node, "dim") % len(shape_of(x))
    ends = list(accumulate(value.shape[dim] for value in node.meta["val"]))
    return [(aten.slice.Tensor, x, dim, start, end) for start, end in zip([0, *ends], ends)]


def _pieces_of_unbind(node: fx.Node) -> list[tuple[Any, ...]]:
    x = node.args[0]
    dim = argument(node, "dim") % len(shape_of(x))
    return [(aten.select.int, x, dim, index) for index in range(shape_of(x)[dim])]


def _broadcast(node: fx.Node) -> list[tuple[Any, ...]]:
    shape = list(node.meta["val"][0].shape)
    return [(aten.expand.default, x, shape) for x in argument(node, "tensors")]


# The calls that stand for each of the results.
_PIECES: dict[object, Callable[[fx.Node], list[tuple[Any, ...]]]] = {
    aten.broadcast_tensors.default: _broadcast,
    aten.split.Tensor: _pieces_of_split,
    aten.split.sizes: _pieces_of_split,
    aten.split_with_sizes.default: _pieces_of_split,
    aten.chunk.default: _pieces_of_split,
    aten.tensor_split.sections: _pieces_of_split,
    aten.tensor_split.indices: _pieces_of_split,
    aten.unsafe_split.Tensor: _pieces_of_split,
    aten.unsafe_chunk.default: _pieces_of_split,
    aten.unbind.int: _pieces_of_unbind,
}


def single_results(draft: Draft) -> None:
    """Operators that still give a tuple are written with operators that give one tensor."""
    for node in draft.calls():
        if not isinstance(node.meta["val"], list | tuple):
            continue
        single = _SINGLE.get(node.target, _picked)
        for user in list(node.users):
            index = user.args[1]
            assert isinstance(index, int)
            with draft.graph.inserting_before(user):
                new = single(draft, node, index)
            draft.substitute(user, new)
        draft.graph.erase_node(node)


def _extreme(draft: Draft, node: fx.Node, index: int) -> fx.Node:
    """max.dim and min.dim: the index by argmax, the value gathered there."""
    x, dim = node.args[0], argument(node, "dim")
    keep = bool(argument(node, "keepdim"))
    is_max = node.target is aten.max.dim
    place = aten.argmax.default if is_max else aten.argmin.default
    if index == 1:
        return draft.call(node, place, x, dim, keep)
    at = draft.call(node, place, x, dim, True)
    value = draft.call(node, aten.gather.default, x, dim, at)
    return value if keep else draft.call(node, aten.squeeze.dim, value, dim)


def _picked(draft: Draft, node: fx.Node, index: int) -> fx.Node:
    """The operator itself, once for each result that is used."""
    return draft.call(node, pick, node.target, index, *node.args, **node.kwargs)


def _variance_mean(draft: Draft, node: fx.Node, index: int) -> fx.Node:
    x, dims, keep = node.args[0], None, False
    if node.target is not aten.var_mean.default:
        dims, keep = argument(node, "dim"), argument(node, "keepdim")
    dims = list(range(len(shape_of(x)))) if dims is None else dims
    if index == 1:
        return draft.call(node, aten.mean.dim, x, dims, keep)
    if node.target is aten.var_mean.correction:
        correction = argument(node, "correction")
    else:
        correction = int(argument(node, "unbiased"))
    return draft.call(node, aten.var.correction, x, dims, correction=correction, keepdim=keep)


def _layer_norm(draft: Draft, node: fx.Node, index: int) -> fx.Node:
    x, shape, weight, bias, epsilon = node.args
    if index == 0:
        return draft.call(node, aten.layer_norm.default, x, shape, weight, bias, epsilon)
    return _picked(draft, node, index)


_SINGLE: dict[object, Callable[[Draft, fx.Node, int], fx.Node]] = {
    aten.max.dim: _extreme,
    aten.min.dim: _extreme,
    aten.var_mean.default: _variance_mean,
    aten.var_mean.dim: _variance_mean,
    aten.var_mean.correction: _variance_mean,
    aten.native_layer_norm.default: _layer_norm,
}
