"""Flattened dims: `x.view(-1, k)` hides batch and sequence in one dim, so it moves downwards.

    reshape(x, [b * s, k]) -> linear -> add -> reshape([b, s, n])    becomes    linear(x) -> add

A reshape that only merges leading dims goes from above an operator to below it, operator by
operator, until it meets a reshape that it can be merged with.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of
from autopar.strategies.node_info import info

aten = torch.ops.aten


def move_flattening_down(draft: GraphBuilder) -> None:
    """Operators see the leading dims apart; what they give is flattened after them."""
    for node in draft.calls():
        flat = next(filter(_lead, node.all_input_nodes), None)
        if flat is not None:
            _move(draft, node, flat)
        elif node.target is aten.embedding.default:
            _embed(draft, node)


def _lead(node: object) -> tuple[int, ...] | None:
    """The leading dims that a reshape merges into its first dim, or None if it does not."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    if len(after) < 2 or 0 in after:
        return None
    count = next((n for n in range(len(before)) if prod(before[:n]) == after[0] and n > 0), 0)
    return before[:count] if count > 1 else None


def _apart(draft: GraphBuilder, flat: fx.Node) -> fx.Node:
    """The value of a flattening reshape with its leading dims apart."""
    lead = _lead(flat)
    assert lead is not None
    source, shape = flat.args[0], [*lead, *shape_of(flat)[1:]]
    assert isinstance(source, fx.Node)
    if list(shape_of(source)) == shape:
        return source
    return draft.call(flat, aten.reshape.default, source, shape)


def _move(draft: GraphBuilder, node: fx.Node, flat: fx.Node) -> None:
    lead = _lead(flat)
    assert lead is not None
    if not isinstance(info(node).val, torch.Tensor):
        return
    with draft.graph.inserting_before(node):
        args = _unflattened(draft, node, lead, len(shape_of(flat)))
        if args is None:
            return
        new = draft.call(node, node.target, *args, **node.kwargs)  # type: ignore[arg-type]
    assert shape_of(new) == (*lead, *shape_of(node)[1:]), (node, shape_of(new))
    draft.replace(node, aten.reshape.default, new, list(shape_of(node)))


def _unflattened(
    draft: GraphBuilder, node: fx.Node, lead: tuple[int, ...], rank: int
) -> list[Any] | None:
    """The arguments of `node` with `lead` in the place of dim 0, or None if it needs dim 0."""
    args: list[Any] = list(node.args)
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    if node.target is aten.matmul.default and len(shape_of(args[1])) > 2:
        flat = [0, 1]  # both sides of a batched product
    elif node.target in (aten.linear.default, aten.matmul.default, aten.layer_norm.default):
        flat = [0]
        if _lead(args[1]) or (node.target is aten.layer_norm.default and len(args[1]) >= rank):
            return None
    elif node.target in _DIMS and not node.kwargs:
        flat = [0]
        dims = [argument(node, name) % rank for name in _DIMS[node.target]]
        if 0 in dims:
            return None
        args[1 : 1 + len(dims)] = [dim + len(lead) - 1 for dim in dims]
    elif node.target is aten.dropout.default or _is_elementwise(node):
        tensors = [index for index, value in enumerate(args) if isinstance(value, fx.Node)]
        flat = [index for index in tensors if len(shape_of(args[index])) >= rank]
        if any(isinstance(value, list | tuple) for value in args):
            return None
    else:
        return None
    if not all(_lead(args[index]) == lead and len(shape_of(args[index])) == rank for index in flat):
        return None
    for index in flat:
        args[index] = _apart(draft, args[index])
    return args


# Operators that are given dims by number: any but the first may be among them.
_DIMS: dict[object, tuple[str, ...]] = {
    aten.softmax.int: ("dim",),
    aten.log_softmax.int: ("dim",),
    aten.transpose.int: ("dim0", "dim1"),
    aten.slice.Tensor: ("dim",),
    aten.select.int: ("dim",),
}


def _is_elementwise(node: fx.Node) -> bool:
    if node.target in (aten.to.dtype, aten.gelu.default, aten.silu.default):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _embed(draft: GraphBuilder, node: fx.Node) -> None:
    """An embedding of flattened ids is a flattened embedding."""
    weight, ids, *rest = node.args
    if isinstance(ids, fx.Node) and ids.target is aten.reshape.default:
        shape = list(shape_of(node))
        with draft.graph.inserting_before(node):
            new = draft.call(node, aten.embedding.default, weight, ids.args[0], *rest)
        draft.replace(node, aten.reshape.default, new, shape)
