"""Eager: one rank's graph as a Python function that wastes no more time than hand-written code.

What passes and readers like (one result a node, operators by their full names, movements that leave
their input alone) costs time at each call. Here the last of it goes:

- selections and slices that together are a whole value become one `unbind` or `split` again, whose
  backward is one copy instead of a sum of padded ones;
- operators become the functions of torch's Python interface, which are bound with less work;
- a movement is called without the dispatcher, and sums in place what nobody else reads.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from autopar.collectives.eager import EAGER, identity_then_sum_in_place, sum_in_place

aten, own = torch.ops.aten, torch.ops.autopar


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """`graph` as a function of its placeholders."""
    quick = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = quick.node_copy(node, lambda n: copies[n])
    _rejoin(quick, aten.select.int, _unbind)
    _rejoin(quick, aten.slice.Tensor, _split)
    for node in quick.nodes:
        node.target = _direct(node)
    quick.lint()
    return fx.GraphModule({}, quick).forward


# What stands for an operator in eager code: same arguments in the same order.
_DIRECT: dict[object, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.conv2d.default: F.conv2d,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.gelu.default: F.gelu,
    aten.layer_norm.default: torch.layer_norm,
    aten.linear.default: F.linear,
    aten.matmul.default: torch.matmul,
    aten.mul.Tensor: torch.mul,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    aten.select.int: torch.select,
    aten.silu.default: F.silu,
    aten.softmax.int: torch.softmax,
    aten.sub.Tensor: torch.sub,
    aten.sum.default: torch.sum,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}


def _direct(node: fx.Node) -> Any:
    if node.target is own.all_reduce.default and _is_fresh(node.args[0]):
        return sum_in_place
    if node.target is own.identity.default and _has_fresh_gradient(node):
        return identity_then_sum_in_place
    if node.op == "call_function":
        return EAGER.get(node.target) or _DIRECT.get(node.target, node.target)  # type: ignore
    return node.target


# Operators whose output is new memory that their own backward does not read, and whose gradient
# for their first input is new memory.
_MAKES_NEW = (aten.linear.default, aten.matmul.default, F.linear, torch.matmul)


def _is_fresh(value: Any) -> bool:
    return value.target in _MAKES_NEW and len(value.users) == 1


def _has_fresh_gradient(value: fx.Node) -> bool:
    return bool(value.users) and all(
        reader.target in _MAKES_NEW and reader.args[0] is value and value not in reader.args[1:]
        for reader in value.users
    )


def _rejoin(graph: fx.Graph, piece: Any, whole: Callable[..., tuple | None]) -> None:
    """Replace calls of `piece` by one operator wherever they are all pieces of a value."""
    for value in list(graph.nodes):
        by_dim = defaultdict(list)
        for reader in value.users:
            if reader.target is piece and reader.args[0] is value and not reader.kwargs:
                by_dim[_dim(reader, value)].append(reader)
        for dim, pieces in by_dim.items():
            if "type" not in value.meta or value.meta["type"].layout.dims[dim]:
                continue  # a cut dim: the sizes of the pieces are not those of the arguments
            found = whole(value, dim, value.meta["type"].shape[dim], pieces)
            if found is None:
                continue
            function, arguments, order = found
            first = next(node for node in graph.nodes if node in pieces)
            with graph.inserting_before(first):
                joined = graph.call_function(function, arguments)
                for index, old in enumerate(order):
                    new = graph.call_function(operator.getitem, (joined, index))
                    new.meta = dict(old.meta)
                    old.replace_all_uses_with(new)
            for old in order:
                graph.erase_node(old)


def _unbind(value: fx.Node, dim: int, size: int, pieces: list[fx.Node]) -> tuple | None:
    by_index = {int(piece.args[2]) % size: piece for piece in pieces}  # type: ignore[call-overload]
    if len(pieces) != size or len(by_index) != size or size < 2:
        return None
    return torch.unbind, (value, dim), [by_index[index] for index in range(size)]


def _split(value: fx.Node, dim: int, size: int, pieces: list[fx.Node]) -> tuple | None:
    bounds = {_bounds(piece, size): piece for piece in pieces}
    ends = sorted(bound for bound in bounds if bound is not None)
    starts = [0, *(end for _, end in ends)]
    if len(ends) != len(pieces) or len(pieces) < 2 or starts[-1] != size:
        return None
    if any(start != at for (start, _), at in zip(ends, starts)):
        return None
    sizes = [end - start for start, end in ends]
    return torch.split_with_sizes, (value, sizes, dim), [bounds[end] for end in ends]


def _bounds(piece: fx.Node, size: int) -> tuple[int, int] | None:
    _, _, start, end, *step = [*piece.args, *(None,) * (4 - len(piece.args))]
    if step not in ([], [1]):
        return None
    lower, upper, _ = slice(start, end).indices(size)  # type: ignore[misc]
    return lower, upper


def _dim(piece: fx.Node, value: fx.Node) -> int:
    dim = piece.args[1] if len(piece.args) > 1 else 0
    return int(dim) % value.meta["val"].ndim  # type: ignore[call-overload,no-any-return]
