"""Indexing: an element of its own for each row is a gather, in which the rows can be cut."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of
from autopar.capture.normalisations.constants import Evaluator
from autopar.strategies.node_info import info

aten = torch.ops.aten


def own_elements_are_gathered(draft: GraphBuilder) -> None:
    """x[arange(rows), places] names all rows by number; a gather leaves them as they lie."""
    calls = [node for node in draft.calls(aten.index.Tensor) if len(argument(node, "indices")) == 2]
    evaluator = Evaluator(draft) if calls else None
    for node in calls:
        rows, places = argument(node, "indices")
        if evaluator is None or rows is None or places is None:
            continue
        shape = shape_of(node.args[0])
        if _counts(evaluator, rows, shape[0]) and _is_for_rows(places, shape[0]):
            with draft.graph.inserting_before(node):
                new = _gathered(draft, node, places, shape)
            draft.substitute(node, new)


def _counts(evaluator: Evaluator, node: fx.Node, rows: int) -> bool:
    """Whether a value is 0, 1, ... for all rows."""
    if shape_of(node) != (rows,) or not evaluator.is_constant(node):
        return False
    value = evaluator.value(node)
    return value is not None and torch.equal(value, torch.arange(rows, dtype=value.dtype))


def _is_for_rows(places: fx.Node, rows: int) -> bool:
    is_number = info(places).val.dtype in (torch.int32, torch.int64)
    return is_number and shape_of(places) in ((), (1,), (rows,))


def _gathered(
    draft: GraphBuilder, node: fx.Node, places: fx.Node, shape: tuple[int, ...]
) -> fx.Node:
    rows, size, *rest = shape
    if info(places).val.dtype != torch.int64:
        places = draft.call(node, aten.to.dtype, places, torch.int64)
    is_from_the_end = draft.call(node, aten.lt.Scalar, places, 0)
    moved = draft.call(node, aten.add.Tensor, places, size)
    places = draft.call(node, aten.where.self, is_from_the_end, moved, places)
    places = draft.call(node, aten.expand.default, places, [rows])
    places = draft.call(node, aten.reshape.default, places, [rows, 1, *(1 for _ in rest)])
    places = draft.call(node, aten.expand.default, places, [rows, 1, *rest])
    found = draft.call(node, aten.gather.default, node.args[0], 1, places)
    return draft.call(node, aten.reshape.default, found, [rows, *rest])
