"""Operators with several results: pieces of a tensor, and one call whose results are nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of
from autopar.errors import InvalidInput
from autopar.strategies.node_info import flat, info
from autopar.strategies.results import result

aten = torch.ops.aten


def split_into_slices(draft: GraphBuilder) -> None:
    """split, chunk, unbind, broadcast_tensors: a slice, selection or expansion for each result."""
    for node in draft.calls():
        if isinstance(info(node).val, list | tuple) and node.target in _PIECES:
            pieces = _PIECES[node.target](node)
            for user in list(node.users):
                index = user.args[1]
                assert isinstance(index, int)
                with draft.graph.inserting_before(user):
                    new = draft.call(node, *pieces[index])
                draft.substitute(user, new)
            draft.graph.erase_node(node)


def _pieces_of_split(node: fx.Node) -> list[tuple[Any, ...]]:
    return _pieces_along(node, argument(node, "dim") % len(shape_of(node.args[0])))


def _pieces_of_columns(node: fx.Node) -> list[tuple[Any, ...]]:
    return _pieces_along(node, min(len(shape_of(node.args[0])) - 1, 1))


def _pieces_along(node: fx.Node, dim: int) -> list[tuple[Any, ...]]:
    x = node.args[0]
    ends = list(accumulate(value.shape[dim] for value in info(node).val))
    return [(aten.slice.Tensor, x, dim, start, end) for start, end in zip([0, *ends], ends)]


def _pieces_of_unbind(node: fx.Node) -> list[tuple[Any, ...]]:
    x = node.args[0]
    dim = argument(node, "dim") % len(shape_of(x))
    return [(aten.select.int, x, dim, index) for index in range(shape_of(x)[dim])]


def _broadcast(node: fx.Node) -> list[tuple[Any, ...]]:
    shape = list(info(node).val[0].shape)
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
    aten.hsplit.int: _pieces_of_columns,
    aten.hsplit.array: _pieces_of_columns,
    aten.vsplit.int: lambda node: _pieces_along(node, 0),
    aten.vsplit.array: lambda node: _pieces_along(node, 0),
    aten.dsplit.int: lambda node: _pieces_along(node, 2),
    aten.dsplit.array: lambda node: _pieces_along(node, 2),
    aten.unsafe_split.Tensor: _pieces_of_split,
    aten.unsafe_chunk.default: _pieces_of_split,
    aten.unbind.int: _pieces_of_unbind,
}


def single_results(draft: GraphBuilder) -> None:
    """A node for each result that is used; some operators have others that give it alone."""
    for node in draft.calls():
        if isinstance(info(node).val, list | tuple) and node.target is not operator.getitem:
            info(node).update(val=flat(values := info(node).val))
            _give_results(draft, node, dict(_used(node, values)))
            if not node.users:
                draft.graph.erase_node(node)


def _give_results(draft: GraphBuilder, node: fx.Node, used: dict[fx.Node, int]) -> None:
    single = _SINGLE.get(node.target)
    if node.target is aten.native_layer_norm.default and any(used.values()):
        single = None  # its statistics come from the same call
    after = node.next
    for user, place in used.items():
        if not isinstance(info(user).val, torch.Tensor):
            raise InvalidInput(
                "what is used of an operator's results are tensors",
                got=f"{type(info(user).val).__name__}, result {place} of {node.target}",
                remedy="use the results that are tensors",
                source=info(node).source,
            )
        with draft.graph.inserting_before(after):
            if single is None:
                new = draft.call(node, result, node, place)
            else:
                new = single(draft, node, place)
        user.replace_all_uses_with(new)
    for taken in reversed(list(draft.calls(operator.getitem))):
        if not taken.users:
            draft.graph.erase_node(taken)


def _used(node: fx.Node, values: Any, first: int = 0) -> Iterator[tuple[fx.Node, int]]:
    """What takes one tensor of `values`, which `node` gives, and its place among all results."""
    for user in node.users:
        index = user.args[1]
        assert isinstance(index, int)
        place = first + len(flat(values[:index]))
        if isinstance(values[index], list | tuple):
            yield from _used(user, values[index], place)
        else:
            yield user, place


def _extreme(draft: GraphBuilder, node: fx.Node, index: int) -> fx.Node:
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


def _variance_mean(draft: GraphBuilder, node: fx.Node, index: int) -> fx.Node:
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


def _layer_norm(draft: GraphBuilder, node: fx.Node, index: int) -> fx.Node:
    return draft.call(node, aten.layer_norm.default, *node.args)


_SINGLE: dict[object, Callable[[GraphBuilder, fx.Node, int], fx.Node]] = {
    aten.max.dim: _extreme,
    aten.min.dim: _extreme,
    aten.var_mean.default: _variance_mean,
    aten.var_mean.dim: _variance_mean,
    aten.var_mean.correction: _variance_mean,
    aten.native_layer_norm.default: _layer_norm,
}
