"""Operators that pick elements: the dims they pick from stay whole, all others can be cut.

All are linear in what they pick from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule
from autopar.strategies.rule import Dim, Rule, Saved, broadcast, names
from autopar.strategies.rules.shapes import movement_rule, same_dims


def _slice(call: OperatorCall) -> Rule:
    """Return the rule of a slice, in which equal parts of its dim may lie."""
    dim, is_whole = call.dim(call["dim"]), call.shape == call.shapes[0]
    rule = same_dims(call, () if is_whole else [dim])
    if is_whole or call.get("step") != 1:
        return rule
    return replace(rule, spans={f"d{dim}": 0, f"n{dim}": call["start"] or 0})


def is_part(call: OperatorCall, count: int) -> bool:
    """Return whether a slice takes one of `count` equal parts, of more than one element."""
    dim = call.dim(call["dim"])
    whole, size, start = call.shapes[0][dim], call.shape[dim], call["start"] or 0
    return call.get("step", 1) == 1 and size > 1 and whole == count * size and start % size == 0


def _start_of_piece(call: OperatorCall, shape: Sequence[int]) -> Any:
    return _bound_of_piece(call, shape, "start")


def _end_of_piece(call: OperatorCall, shape: Sequence[int]) -> Any:
    return _bound_of_piece(call, shape, "end")


def _bound_of_piece(call: OperatorCall, shape: Sequence[int], which: str) -> Any:
    dim, bound = call.dim(call["dim"]), call[which]
    if shape[dim] == call.shape[dim]:
        return bound
    bound = min(bound or 0, call.shapes[0][dim])
    return bound * shape[dim] // call.shape[dim]


def _select(call: OperatorCall) -> Rule:
    dim = call.dim(call["dim"])
    dims = names(len(call.shapes[0]))
    return movement_rule(call, [dims], dims[:dim] + dims[dim + 1 :], whole=dims[dim])


def _index_select(call: OperatorCall) -> Rule:
    dim = call.dim(call["dim"])
    dims = names(len(call.shapes[0]))
    index: list[Dim] = [("j",)] * len(call.shapes[1])
    out: list[Dim] = [("j",) if i == dim else factor for i, factor in enumerate(dims)]
    return movement_rule(call, [dims, index], out, whole=[f"d{dim}"], saved=Saved((1,)))


def _gather(call: OperatorCall) -> Rule | None:
    """Return the rule of gather; the table shares dims of equal size, except `dim`."""
    dim = call.dim(call["dim"])
    table, index = call.shapes
    if len(table) != len(index):
        return None  # a number, and one place of it
    out = names(len(index))
    into: list[Dim] = []
    whole = []
    for i, factor in enumerate(out):
        if i != dim and table[i] == index[i]:
            into.append(factor)
            continue
        into.append((f"n{i}",))
        whole.append(f"n{i}")
        if i != dim:
            whole += factor  # the table's rows are matched by position
    return movement_rule(call, [into, out], out, whole=whole, saved=Saved((0, 1)))


def _index(call: OperatorCall) -> Rule | None:
    """Return the rule of advanced indexing: indexed dims stay whole, those of indices are free."""
    indices = list(call["indices"])
    present = [i for i, index in enumerate(indices) if index is not None]
    if any(info(node).val.dtype == torch.bool for node in call.inputs[1:]):
        return None
    into = names(len(call.shapes[0]))
    picked = names(max(map(len, call.shapes[1:])), "j")
    inputs = [into, *(broadcast(picked, shape) for shape in call.shapes[1:])]
    adjacent = all(b == a + 1 for a, b in itertools.pairwise(present))
    at = present[0] if adjacent else 0
    rest = [factor for i, factor in enumerate(into) if i not in present]
    out = rest[:at] + picked + rest[at:]
    whole = [f"d{i}" for i in present]
    return movement_rule(call, inputs, out, whole=whole, saved=Saved(tuple(range(1, len(inputs)))))


def _scatter(call: OperatorCall) -> Rule | None:
    """Return the rule of scatter: tensors share the dims of one size, except `dim`."""
    if len({len(shape) for shape in call.shapes}) != 1:
        return None  # a number, and one place of it
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    whole = [f"d{dim}"]
    inputs: list[list[Dim]] = [out]
    for number, shape in enumerate(call.shapes[1:], 1):
        dims: list[Dim] = []
        for i in range(len(shape)):
            shared = i != dim and all(other[i] == call.shape[i] for other in call.shapes)
            dims.append((f"d{i}",) if shared else (f"n{number}_{i}",))
            if not shared:
                whole += [f"n{number}_{i}", f"d{i}"]
        inputs.append(dims)
    saved = Saved((0, 1, 2), output=True) if "reduce" in call.arguments else Saved((1,))
    return call.rule(inputs, out, whole=whole, saved=saved)


def _written(call: OperatorCall, part: list[Dim]) -> Rule:
    """Return the rule of an input with a part replaced; dims that the part lacks are whole."""
    dims = names(len(call.shape))
    return movement_rule(call, [dims, part], dims, whole={*dims} ^ {*part}, passes=[(0, 1)])


def _select_scatter(call: OperatorCall) -> Rule:
    """Return the rule of select_scatter: the second input lacks the dim of the index."""
    dim, dims = call.dim(call["dim"]), names(len(call.shape))
    return _written(call, dims[:dim] + dims[dim + 1 :])


def _slice_scatter(call: OperatorCall) -> Rule:
    """Return the rule of slice_scatter: the second input has the slice's size in its dim."""
    dim, dims = call.dim(call["dim"]), names(len(call.shape))
    rule = _written(call, [*dims[:dim], ("part",), *dims[dim + 1 :]])
    return replace(
        rule, spans={f"d{dim}": 0, "part": call["start"] or 0} if call["step"] == 1 else {}
    )


def _diagonal_scatter(call: OperatorCall) -> Rule:
    """Return the rule of diagonal_scatter: the diagonal is the second input's last dim."""
    held = {call.dim(call["dim1"]), call.dim(call["dim2"])}
    dims = [dim for i, dim in enumerate(names(len(call.shape))) if i not in held]
    return _written(call, [*dims, ("part",)])


def _index_add(call: OperatorCall) -> Rule:
    """Return the rule of rows of a source that are added to, or replace, the indexed rows."""
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    index: list[Dim] = [("j",)] * len(call.shapes[1])
    source: list[Dim] = [("j",) if i == dim else factor for i, factor in enumerate(out)]
    whole = ["j", f"d{dim}"]
    inputs = [out, index, source][: len(call.shapes)]
    reduced = "reduce" in call.arguments
    saved = Saved((0, 1, 2), output=True) if reduced else Saved((1, 2))
    return call.rule(inputs, out, whole=whole, saved=saved)


def _index_fill(call: OperatorCall) -> Rule:
    """Return the rule of index_fill, whose value is a number or a tensor of one."""
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    index: list[Dim] = [("j",)] * len(call.shapes[1])
    inputs = [out, index, []][: len(call.shapes)]
    return call.rule(inputs, out, whole=["j", f"d{dim}"], saved=Saved((1,)))


def _index_put(call: OperatorCall) -> Rule | None:
    """Return the rule of index_put; the indexed dims and the dims of indices stay whole."""
    indices, (_, *shapes, values) = list(call["indices"]), call.shapes
    if any(info(node).val.dtype == torch.bool for node in call.inputs[1:-1]):
        return None
    present = [i for i, index in enumerate(indices) if index is not None]
    into = names(len(call.shape))
    picked = names(max(map(len, shapes)), "j")
    adjacent = all(b == a + 1 for a, b in itertools.pairwise(present))
    at = present[0] if adjacent else 0
    rest = [factor for i, factor in enumerate(into) if i not in present]
    out = rest[:at] + picked + rest[at:]
    inputs = [into, *(broadcast(picked, shape) for shape in shapes), broadcast(out, values)]
    whole = [*picked, *(into[i] for i in present)]
    saved = Saved(tuple(range(1, len(inputs) - 1)))
    passes = [(0, len(inputs) - 1)]
    return call.rule(inputs, into, whole=whole, saved=saved, passes=passes)


def _take(call: OperatorCall) -> Rule:
    """Return the rule of take, whose indices count in the whole input."""
    into, out = names(len(call.shapes[0])), names(len(call.shape), "j")
    return movement_rule(call, [into, out], out, whole=into, saved=Saved((0, 1)))


def all_whole(call: OperatorCall, linear: Sequence[int] = (), saved: Saved = Saved()) -> Rule:  # noqa: B008
    """Return a rule that cuts nothing; partial sums pass through the `linear` inputs together."""
    inputs = [names(len(shape), f"in{i}_") for i, shape in enumerate(call.shapes)]
    more = [names(output.dim(), f"out{i}_") for i, output in enumerate(call.outputs)]
    whole = [dim for dims in (*inputs, *more) for dim in dims]
    passes = [linear] if linear else []
    return call.rule(inputs, more[0], more=more[1:], whole=whole, passes=passes, saved=saved)


def _blocks(call: OperatorCall) -> Rule:
    return all_whole(call, range(len(call.shapes)))


def _segments(call: OperatorCall) -> Rule | None:
    """Return the rule of rows of the first dim that are reduced by segments."""
    if call["axis"] != 0 or len(call.shapes) != 2 or len(call.shapes[1]) != 1:
        return None
    dims = names(len(call.shape))
    rows, ends = [("rows",), *dims[1:]], [("ends",)]
    whole = ["rows", "ends", "d0"]
    return call.rule([rows, ends], dims, whole=whole, saved=Saved((0, 1), output=True))


def _sorted_search(call: OperatorCall) -> Rule:
    """Return the rule of searches among sorted values: of the same row, or of one row for all."""
    if "boundaries" in call.arguments:
        return call.parse("..., b! -> ...")
    ordered = call.shapes[0]
    values = names(len(call.shape), "v")
    row: list[Dim] = [("b",)]
    rows = [*values[: len(ordered) - 1], *row] if len(ordered) > 1 else row
    return call.rule([rows, values, rows][: len(call.shapes)], values, whole=row)


def _histogram(call: OperatorCall) -> Rule:
    """Return the rule of histc: without ends, bins depend on the extremes of all values."""
    has_ends = call["min"] != call["max"]
    return call.parse("... -> bins!" if has_ends else "...! -> bins!")


_PIECE = Traits(view=True, leading="dim")
_BOUNDS = {"start": _start_of_piece, "end": _end_of_piece}
register_rule("aten.slice", _slice, traits=replace(_PIECE, of_piece=_BOUNDS))
register_rule("aten.narrow", _slice, traits=_PIECE)
register_rule("aten.select", _select, traits=_PIECE)
register_rule("aten.index_select", _index_select)
register_rule("aten.gather", _gather)
register_rule("aten.index", _index)
register_rule(aten("scatter scatter_add scatter_reduce"), _scatter)
register_rule("aten.select_scatter", _select_scatter)
register_rule("aten.slice_scatter", _slice_scatter, traits=Traits(of_piece=_BOUNDS))
register_rule("aten.diagonal_scatter", _diagonal_scatter)
register_rule(aten("index_add index_copy index_reduce"), _index_add)
register_rule("aten.index_fill", _index_fill)
register_rule("aten.index_put", _index_put)
register_rule("aten.take", _take)
register_rule(aten("bucketize.Tensor searchsorted.Tensor"), _sorted_search)
register_rule("aten.histc", _histogram)
register_rule("aten.histogram", all_whole)
register_rule("aten.masked_scatter", partial(all_whole, linear=(0, 2), saved=Saved((1,))))
register_rule("aten.put", partial(all_whole, linear=(0, 2), saved=Saved((1, 2))))
register_rule(aten("block_diag _chunk_cat"), _blocks)
register_rule("aten.segment_reduce", _segments)
register_rule("aten.pdist", partial(all_whole, saved=Saved((0,), output=True)))
register_rule("aten.one_hot", "... -> ... classes!")
