"""Operators with several results: pieces of a tensor, and one call whose results are nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.results import result

aten = torch.ops.aten


PIECES = (
    aten.broadcast_tensors,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.tensor_split,
    aten.hsplit,
    aten.vsplit,
    aten.dsplit,
    aten.unsafe_split,
    aten.unsafe_chunk,
    aten.unbind,
)
_DIMS = {aten.vsplit: 0, aten.dsplit: 2}  # in which those without an argument for it split


def split_into_slices(builder: GraphBuilder) -> None:
    """split, chunk, unbind, broadcast_tensors: a slice, selection or expansion for each result."""
    for node in builder.calls(*PIECES):
        pieces = _pieces(OperatorCall(node))
        for user in list(node.users):
            index = user.args[1]
            assert isinstance(index, int)
            with builder.graph.inserting_before(user):
                new = builder.call(node, *pieces[index])
            builder.substitute(user, new)
        builder.graph.erase_node(node)


def _pieces(call: OperatorCall) -> list[tuple[Any, ...]]:
    """The calls that stand for each of the results."""
    packet, x = call.node.target.overloadpacket, call.inputs[0]  # type: ignore[union-attr]
    if packet is aten.broadcast_tensors:
        return [(aten.expand.default, each, list(call.shape)) for each in call.inputs]
    columns = min(len(call.shapes[0]) - 1, 1)
    dim = call.dim(call.get("dim", _DIMS.get(packet, columns)))
    if packet is aten.unbind:
        return [(aten.select.int, x, dim, index) for index in range(call.shapes[0][dim])]
    ends = list(accumulate(value.shape[dim] for value in call.outputs))
    return [(aten.slice.Tensor, x, dim, start, end) for start, end in zip([0, *ends], ends)]


def single_results(builder: GraphBuilder) -> None:
    """A node for each result that is used; some operators have others that give it alone."""
    for node in builder.calls():
        if isinstance(info(node).val, list | tuple) and node.target is not operator.getitem:
            info(node).update(val=flat_values(values := info(node).val))
            _give_results(builder, node, dict(_used(node, values)))
            if not node.users:
                builder.graph.erase_node(node)


def _give_results(builder: GraphBuilder, node: fx.Node, used: dict[fx.Node, int]) -> None:
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
        with builder.graph.inserting_before(after):
            if single is None:
                new = builder.call(node, result, node, place)
            else:
                new = single(Site(builder, node), place)
        user.replace_all_uses_with(new)
    _drop_taken(builder, node)


def _drop_taken(builder: GraphBuilder, node: fx.Node) -> None:
    """Of what takes a result of `node`, or of a list among these, that which nobody reads."""
    for taken in [user for user in node.users if user.target is operator.getitem]:
        _drop_taken(builder, taken)
        if not taken.users:
            builder.graph.erase_node(taken)


def _used(node: fx.Node, values: Any, first: int = 0) -> Iterator[tuple[fx.Node, int]]:
    """What takes one tensor of `values`, which `node` gives, and its place among all results."""
    for user in node.users:
        index = user.args[1]
        assert isinstance(index, int)
        place = first + len(flat_values(values[:index]))
        if isinstance(values[index], list | tuple):
            yield from _used(user, values[index], place)
        else:
            yield user, place


def _extreme(call: Site, index: int) -> fx.Node:
    """max.dim and min.dim: the index by argmax, the value gathered there."""
    x, dim, keep = call.arguments.values()
    place = aten.argmax.default if call.node.target is aten.max.dim else aten.argmin.default
    if index == 1:
        return call.make(place, x, dim, bool(keep))
    value = call.make(aten.gather.default, x, dim, call.make(place, x, dim, True))
    return value if keep else call.make(aten.squeeze.dim, value, dim)


def _variance_mean(call: Site, index: int) -> fx.Node:
    x, dims, keep = call["self"], call.get("dim"), call.get("keepdim", False)
    dims = list(range(len(call.shapes[0]))) if dims is None else dims
    if index == 1:
        return call.make(aten.mean.dim, x, dims, keep)
    correction = call["correction"] if "correction" in call.arguments else int(call["unbiased"])
    spread = _SPREADS[call.node.target.overloadpacket]  # type: ignore[union-attr]
    return call.make(spread, x, dims, correction=correction, keepdim=keep)


_SPREADS = {aten.var_mean: aten.var.correction, aten.std_mean: aten.std.correction}


def _layer_norm(call: Site, index: int) -> fx.Node:
    return call.make(aten.layer_norm.default, *call.arguments.values())


_SINGLE: dict[object, Callable[[Site, int], fx.Node]] = {
    aten.max.dim: _extreme,
    aten.min.dim: _extreme,
    **{
        getattr(packet, name): _variance_mean
        for packet in _SPREADS
        for name in ("default", "dim", "correction")
    },
    aten.native_layer_norm.default: _layer_norm,
}
