"""Indexing: an element of its own for each row is a gather, in which the rows can be cut."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, shape_of
from autopar.capture.normalisations.constants import Evaluator
from autopar.strategies.node_info import info

aten = torch.ops.aten


def own_elements_are_gathered(builder: GraphBuilder) -> None:
    """x[arange(rows), places] names all rows by number; a gather leaves them as they lie."""
    evaluator = None
    for node in builder.calls(aten.index.Tensor):
        call = Site(builder, node)
        if len(call["indices"]) != 2 or None in call["indices"]:
            continue
        (rows, places), size = call["indices"], call.shapes[0][0]
        evaluator = evaluator or Evaluator(builder)
        if _counts(evaluator, rows, size) and _is_for_rows(places, size):
            with builder.graph.inserting_before(node):
                new = _gathered(call, places)
            builder.substitute(node, new)


def _counts(evaluator: Evaluator, node: fx.Node, rows: int) -> bool:
    """Whether a value is 0, 1, ... for all rows."""
    if shape_of(node) != (rows,) or not evaluator.is_constant(node):
        return False
    value = evaluator.value(node)
    return value is not None and torch.equal(value, torch.arange(rows, dtype=value.dtype))


def _is_for_rows(places: fx.Node, rows: int) -> bool:
    is_number = info(places).val.dtype in (torch.int32, torch.int64)
    return is_number and shape_of(places) in ((), (1,), (rows,))


def _gathered(call: Site, places: fx.Node) -> fx.Node:
    rows, size, *rest = call.shapes[0]
    if info(places).val.dtype != torch.int64:
        places = call.make(aten.to.dtype, places, torch.int64)
    is_from_the_end = call.make(aten.lt.Scalar, places, 0)
    moved = call.make(aten.add.Tensor, places, size)
    places = call.make(aten.where.self, is_from_the_end, moved, places)
    places = call.make(aten.expand.default, places, [rows])
    places = call.make(aten.reshape.default, places, [rows, 1, *(1 for _ in rest)])
    places = call.make(aten.expand.default, places, [rows, 1, *rest])
    found = call.make(aten.gather.default, call["self"], 1, places)
    return call.make(aten.reshape.default, found, [rows, *rest])
