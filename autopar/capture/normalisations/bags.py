"""Bags of embeddings of one length are the rows of a table, summed.

    embedding_bag(table, ids, arange(0, 12, 3))    ->    embedding(table, ids.view(4, 3)).sum(1)

So the samples can be cut; of bags of any length only the columns of the table can.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, shape_of
from autopar.strategies.kernels import bags_of_rows

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2  # torch's numbers for the mode


def bags_are_one_result(builder: GraphBuilder) -> None:
    """Where nothing but the bags is used, it is one result; and rows if all have one length."""
    for node in builder.calls(aten.embedding_bag):
        call = Site(builder, node)
        length = _length(call)
        is_bag = not any(user.users for user in node.users if user.args[1] != 0)
        is_plain = not call["scale_grad_by_freq"] and not call["sparse"]
        padded = call.get("padding_idx") is not None and call["mode"] == MAX
        if is_bag:
            with builder.graph.inserting_before(node):
                if length and is_plain and not padded:
                    bags = _reduced(call, [shape_of(call["offsets"])[0], length])
                else:
                    bags = call.make(bags_of_rows, *call.arguments.values())
            for user in list(node.users):
                builder.substitute(user, bags)
            builder.graph.erase_node(node)


def _length(call: Site) -> int | None:
    """That of all bags, if they start at equal distances and none is left over."""
    starts, count = call["offsets"], shape_of(call["indices"])[0]
    if starts.target is not aten.arange.start_step or call["include_last_offset"]:
        return None
    first, end, step = starts.args
    is_even = first == 0 and end == count and step > 0 and count % step == 0
    return step if is_even else None


def _reduced(call: Site, shape: list[int]) -> fx.Node:
    """The sum, mean or maximum of each bag, without what fills it up."""
    make, mode, filler = call.make, call["mode"], call.get("padding_idx")
    ids = make(aten.reshape.default, call["indices"], shape)
    rows = make(aten.embedding.default, call["weight"], ids)
    if (weights := call["per_sample_weights"]) is not None:
        rows = make(aten.mul.Tensor, rows, make(aten.reshape.default, weights, [*shape, 1]))
    if mode == MAX:
        return make(operator.getitem, make(aten.max.dim, rows, 1), 0)
    if filler is None:
        return make(aten.mean.dim if mode == MEAN else aten.sum.dim_IntList, rows, [1])
    fills = make(aten.eq.Scalar, ids, filler)
    rows = make(aten.masked_fill.Scalar, rows, make(aten.unsqueeze.default, fills, 2), 0)
    total = make(aten.sum.dim_IntList, rows, [1])
    if mode == SUM:
        return total
    count: Any = make(aten.sum.dim_IntList, make(aten.logical_not.default, fills), [1], True)
    return make(aten.div.Tensor, total, make(aten.clamp_min.default, count, 1))
