"""Recombine: operators that capture took apart, and no cut needed apart, become one again.

- selections and slices that together are a whole value: one `unbind` or `split`, whose backward is
  one copy instead of a sum of padded ones;
- the sum of a cross-entropy's elements, and its division by their count: a reduction of the loss;
- a sum divided by the number of its elements: a mean.

For graphs of one rank that run eagerly: an `unbind` has several results.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.passes.pass_context import LocalContext
from autopar.strategies import OperatorCall
from autopar.strategies.kernels import count_targets, cross_entropy
from autopar.strategies.node_info import info

aten = torch.ops.aten


def recombine(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Replace groups of calls by the one operator that they amount to, in place."""
    _join_pieces(graph, aten.select.int, _unbind)
    _join_pieces(graph, aten.slice.Tensor, _split)
    for node in list(graph.nodes):
        if node.target is aten.sum.default and _follows(node, cross_entropy) and _plain(node):
            loss = node.all_input_nodes[0]
            _become(node, reduced_cross_entropy, ("sum", *loss.args), [loss])
    for node in list(graph.nodes):
        if node.target is aten.div.Tensor and _is_mean_loss(node):
            total, count = node.all_input_nodes
            _become(node, reduced_cross_entropy, ("mean", *total.args[1:]), [total, count])
        elif node.target is aten.div.Tensor and _is_mean(node):
            total = node.all_input_nodes[0]
            _become(node, torch.mean, total.args, [total])
    return graph


def reduced_cross_entropy(
    reduction: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of all elements, reduced; classes are the last dim."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _follows(node: fx.Node, target: Any) -> bool:
    """Return whether the first input is a call of `target` that nothing else reads."""
    value = node.args[0]
    if not isinstance(value, fx.Node) or info(value).weight_inputs is not None:
        return False
    return value.target is target and len(value.users) == 1


def _plain(node: fx.Node) -> bool:
    """Return whether neither the node nor its first input has keywords."""
    return not node.kwargs and not node.args[0].kwargs  # type: ignore[union-attr]


def _is_mean_loss(node: fx.Node) -> bool:
    if not _follows(node, reduced_cross_entropy) or not isinstance(node.args[1], fx.Node):
        return False
    total: Any = node.args[0]
    count: Any = node.args[1]
    if count.target is not count_targets or count.kwargs or len(count.users) != 1:
        return False
    _, _, target, *options = total.args
    counted: list[Any] = [*count.args, *(None, -100)[len(count.args) - 1 :]]
    weight, ignored = [*options, *(None, -100)[len(options) :]][:2]
    return [target, weight, ignored] == counted and total.args[0] == "sum"


def _is_mean(node: fx.Node) -> bool:
    if not (_follows(node, aten.sum.dim_IntList) or _follows(node, aten.sum.default)):
        return False
    total: Any = node.args[0]
    x = total.args[0]
    if not _plain(node) or "type" not in x.meta or not isinstance(node.args[1], int):
        return False
    dims = total.args[1] if len(total.args) > 1 else range(len(info(x).type.shape))
    if not dims or any(info(x).type.layout.dims[dim] for dim in dims):
        return False
    count = math.prod(info(x).type.shape[dim] for dim in dims)
    return node.args[1] == count and info(x).type.dtype == info(node).type.dtype


def _become(node: fx.Node, function: Any, args: tuple, dead: Iterable[fx.Node]) -> None:
    """Let a node call another function, and erase the `dead` inputs that it no longer reads."""
    node.target, node.args, node.kwargs = function, args, {}
    for value in dead:
        node.graph.erase_node(value)


_WholeCall = tuple[Callable[..., Any], tuple, list[fx.Node]]  # function, arguments, pieces in order


def _join_pieces(
    graph: fx.Graph,
    piece: Any,
    find_whole: Callable[[fx.Node, int, int, list[fx.Node]], _WholeCall | None],
) -> None:
    """Replace calls of `piece` wherever they are all pieces of a value along a dim not cut."""
    for value in list(graph.nodes):
        by_dim = defaultdict(list)
        for reader in value.users:
            if reader.target is piece and not reader.kwargs and "type" in value.meta:
                by_dim[OperatorCall(reader)["dim"] % info(value).val.ndim].append(reader)
        for dim, pieces in by_dim.items():
            if info(value).type.layout.dims[dim]:
                continue
            joined = find_whole(value, dim, info(value).type.shape[dim], pieces)
            if joined is not None:
                _join(graph, pieces, *joined)


def _join(
    graph: fx.Graph, pieces: list[fx.Node], function: Any, args: tuple, order: list[fx.Node]
) -> None:
    first = next(node for node in graph.nodes if node in pieces)
    with graph.inserting_before(first):
        joined = graph.call_function(function, args)
        facts, regions = info(first), {info(piece).region for piece in pieces}
        info(joined).update(
            val=facts.val,
            differentiable=facts.differentiable,
            module=facts.module,
            region=regions.pop() if len(regions) == 1 else None,
        )
        for index, old in enumerate(order):
            new = graph.call_function(operator.getitem, (joined, index))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
    for old in order:
        graph.erase_node(old)


def _unbind(value: fx.Node, dim: int, size: int, pieces: list[fx.Node]) -> _WholeCall | None:
    by_index = {OperatorCall(piece)["index"] % size: piece for piece in pieces}
    if len(pieces) != size or len(by_index) != size or size < 2:
        return None
    return torch.unbind, (value, dim), [by_index[index] for index in range(size)]


def _split(value: fx.Node, dim: int, size: int, pieces: list[fx.Node]) -> _WholeCall | None:
    by_bounds = {}
    for piece in pieces:
        call = OperatorCall(piece)
        if call["step"] != 1:
            return None
        by_bounds[slice(call["start"], call["end"]).indices(size)[:2]] = piece
    bounds = sorted(by_bounds)
    ends = [end for _, end in bounds]
    if [start for start, _ in bounds] != [0, *ends[:-1]] or ends[-1] != size:
        return None
    if len(pieces) < 2 or len(bounds) != len(pieces):
        return None
    sizes = [end - start for start, end in bounds]
    return torch.split_with_sizes, (value, sizes, dim), [by_bounds[bound] for bound in bounds]
