"""Lookups: every row that a program looks up in a table is there, as far as it says which.

A row that inputs name is known when they are there; what depends on none of them, as the positions
of a sequence, is known now: a table of positions ends where a model does.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.listing import operator_name
from autopar.capture.normalisations.constants import Evaluator
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.node_info import info

aten = torch.ops.aten

_NUMBERS = (torch.int32, torch.int64)
_FROM_THE_END = (aten.index.Tensor,)  # they count rows from the end, too, by numbers below 0
_LOOKUPS = (aten.embedding.default, aten.index_select.default, aten.gather.default, *_FROM_THE_END)


def require_rows(builder: GraphBuilder) -> None:
    """Refuse a lookup of rows that a table does not have."""
    evaluator = None
    for node in builder.calls(*_LOOKUPS):
        evaluator = evaluator or Evaluator(builder)
        for index, dim in _indices(node):
            if not evaluator.is_constant(index):
                continue
            table = OperatorCall(node).inputs[0]
            size = info(table).val.shape[dim] if info(table).val.ndim else 1
            least = -size if node.target in _FROM_THE_END else 0
            outside = evaluator.ask(index, partial(_row_outside, least=least, size=size))
            if outside is None:
                continue
            raise InvalidInput(
                "rows that are looked up in a table are there",
                got=f"row {outside} of {size}: "
                f"{operator_name(node.target)} in {info(node).module or 'the model'}",
                remedy="a table of more rows, or shorter inputs where it is their places that are "
                "looked up",
                source=info(node).source,
            )


def _row_outside(values: torch.Tensor, least: int, size: int) -> int | None:
    """The row that is looked up in a table of that size and is not there."""
    if values.dtype not in _NUMBERS or not values.numel():
        return None
    first, last = (int(end) for end in values.aminmax())
    if last >= size:
        return last
    return first if first < least else None


def _indices(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """What numbers rows, and the dim of the table that these are of."""
    call = OperatorCall(node)
    if node.target is aten.embedding.default:
        return [(call["indices"], 0)]
    if node.target in _FROM_THE_END:
        return [(one, dim) for dim, one in enumerate(call["indices"]) if one is not None]
    return [(call["index"], call["dim"])]
