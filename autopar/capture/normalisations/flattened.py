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

from autopar.capture.graph_builder import GraphBuilder, shape_of
from autopar.strategies import OperatorCall, rule_of, tensor_inputs, traits_of
from autopar.strategies.node_info import info
from autopar.strategies.rules.elementwise import elementwise

aten = torch.ops.aten


def move_flattening_down(builder: GraphBuilder) -> None:
    """Operators see the leading dims apart; what they give is flattened after them."""
    for node in builder.calls():
        flat = next(filter(_lead, node.all_input_nodes), None)
        if flat is not None and isinstance(info(node).val, torch.Tensor):
            _move(builder, node, flat)
        elif node.target is aten.embedding.default:
            _embed(builder, node)


def _lead(node: object) -> tuple[int, ...] | None:
    """The leading dims that a reshape merges into its first dim, of the last the outer part, as
    the batch of [batch * heads]; or None if it does not."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    if len(after) < 2 or 0 in after:
        return None
    count = next((n for n in range(1, len(before)) if prod(before[: n + 1]) >= after[0]), 0)
    rest, beside = divmod(after[0], prod(before[:count]))
    if not count or beside or rest < 2 or before[count] % rest:
        return None
    return *before[:count], rest


def _apart(builder: GraphBuilder, flat: fx.Node) -> fx.Node:
    """The value of a flattening reshape with its leading dims apart."""
    lead = _lead(flat)
    assert lead is not None
    source, shape = flat.args[0], [*lead, *shape_of(flat)[1:]]
    assert isinstance(source, fx.Node)
    if list(shape_of(source)) == shape:
        return source
    return builder.call(flat, aten.reshape.default, source, shape)


def _move(builder: GraphBuilder, node: fx.Node, flat: fx.Node) -> None:
    lead = _lead(flat)
    assert lead is not None
    with builder.graph.inserting_before(node):
        args = _unflattened(builder, node, lead, len(shape_of(flat)))
        if args is None:
            return
        new = builder.call(node, node.target, *args, **node.kwargs)  # type: ignore[arg-type]
    assert shape_of(new) == (*lead, *shape_of(node)[1:]), (node, shape_of(new))
    builder.replace(node, aten.reshape.default, new, list(shape_of(node)))


def _unflattened(
    builder: GraphBuilder, node: fx.Node, lead: tuple[int, ...], rank: int
) -> list[Any] | None:
    """The arguments of `node` with `lead` in the place of dim 0, or None if it needs dim 0."""
    args: list[Any] = list(node.args)
    leading = traits_of(node).leading
    places = [index for index, value in enumerate(args) if isinstance(value, fx.Node)]
    if leading is None and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    if [args[index] for index in places] != list(tensor_inputs(node)) or (leading and node.kwargs):
        return None  # some stand in a list, or have a name
    call = OperatorCall(node)
    rule = rule_of(node) or elementwise(call)
    factor = next(dims[0] for index, dims in zip(places, rule.inputs) if _lead(args[index]))
    if rule.outputs[0][:1] != (factor,) or not rule.whole.isdisjoint(factor):
        return None
    for index, dims in zip(places, rule.inputs):
        if factor in dims:
            if dims[0] != factor or _lead(args[index]) != lead:
                return None
            args[index] = _apart(builder, args[index])
    for index, name in enumerate((leading or "").split(), 1):
        args[index] = call[name] % rank + len(lead) - 1
    return args


def _embed(builder: GraphBuilder, node: fx.Node) -> None:
    """An embedding of flattened ids is a flattened embedding."""
    weight, ids, *rest = node.args
    if isinstance(ids, fx.Node) and ids.target is aten.reshape.default:
        shape = list(shape_of(node))
        with builder.graph.inserting_before(node):
            new = builder.call(node, aten.embedding.default, weight, ids.args[0], *rest)
        builder.replace(node, aten.reshape.default, new, shape)
