"""Operators that pick elements: the dims they pick from stay whole, all others can be cut.

All are linear in what they pick from.
"""

from __future__ import annotations

import itertools
import math

import torch

from autopar.strategies.node_info import info
from autopar.strategies.registry import Call, aten, register_rule
from autopar.strategies.rule import Dim, Rule, Saved
from autopar.strategies.shapes import FIRST, VIEW, names, same_dims, sizes_of


def _slice(call: Call) -> Rule:
    return same_dims(call, () if call.shape == call.shapes[0] else [call.dim(call["dim"])])


def _select(call: Call) -> Rule:
    dim = call.dim(call["dim"])
    dims = names(len(call.shapes[0]))
    out = dims[:dim] + dims[dim + 1 :]
    sizes = sizes_of(dims, call.shapes[0])
    return call.rule([dims], out, sizes, whole=dims[dim], passes=FIRST, flops=0.0)


def _index_select(call: Call) -> Rule:
    dim = call.dim(call["dim"])
    dims = names(len(call.shapes[0]))
    out: list[Dim] = [("j",) if i == dim else factor for i, factor in enumerate(dims)]
    index: list[Dim] = [("j",)] * len(call.shapes[1])
    sizes = sizes_of(dims, call.shapes[0]) | {"j": call.shape[dim] if out else 1}
    held = dims[dim] if dims else ()
    return call.rule(
        [dims, index],
        out,
        sizes,
        whole=held,
        passes=FIRST,
        flops=0.0,
        saved=Saved((1,)),
    )


def _gather(call: Call) -> Rule:
    """Output and index share all dims; the table shares those of equal size except `dim`."""
    dim = call.dim(call["dim"])
    table, index = call.shapes
    out = names(len(index))
    sizes = sizes_of(out, index)
    into: list[Dim] = []
    whole = []
    for i, factor in enumerate(out):
        if i != dim and table[i] == index[i]:
            into.append(factor)
            continue
        into.append((f"n{i}",))
        sizes[f"n{i}"] = table[i]
        whole.append(f"n{i}")
        if i != dim:
            whole += factor  # the table's rows are matched by position
    return call.rule(
        [into, out], out, sizes, whole=whole, passes=FIRST, flops=0.0, saved=Saved((0, 1))
    )


def _index(call: Call) -> Rule | None:
    """Advanced indexing: indexed dims stay whole, the broadcast dims of the indices are free."""
    indices = list(call["indices"])
    present = [i for i, index in enumerate(indices) if index is not None]
    if any(info(node).val.dtype == torch.bool for node in call.inputs[1:]):
        return None
    table = call.shapes[0]
    into = names(len(table))
    sizes = sizes_of(into, table)
    shared = torch.broadcast_shapes(*call.shapes[1:])
    picked = names(len(shared), "j")
    sizes |= sizes_of(picked, shared)
    inputs: list[list[Dim]] = [into]
    for shape in call.shapes[1:]:
        aligned = picked[len(shared) - len(shape) :]
        inputs.append([() if size == 1 else dim for dim, size in zip(aligned, shape)])
    adjacent = all(b == a + 1 for a, b in itertools.pairwise(present))
    at = present[0] if adjacent else 0
    rest = [factor for i, factor in enumerate(into) if i not in present]
    out = rest[:at] + picked + rest[at:]
    whole = [f"d{i}" for i in present]
    saved = Saved(tuple(range(1, len(inputs))))
    return call.rule(inputs, out, sizes, whole=whole, passes=FIRST, flops=0.0, saved=saved)


def _scatter(call: Call) -> Rule:
    """All tensors share the dims other than `dim` where all have one size."""
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    sizes = sizes_of(out, call.shape)
    whole = [f"d{dim}"]
    inputs: list[list[Dim]] = [out]
    for number, shape in enumerate(call.shapes[1:], 1):
        dims: list[Dim] = []
        for i, size in enumerate(shape):
            shared = i != dim and all(other[i] == call.shape[i] for other in call.shapes)
            dims.append((f"d{i}",) if shared else (f"n{number}_{i}",))
            if not shared:
                sizes[f"n{number}_{i}"] = size
                whole += [f"n{number}_{i}", f"d{i}"]
        inputs.append(dims)
    return call.rule(inputs, out, sizes, whole=whole, saved=Saved((1,)))


def _select_scatter(call: Call) -> Rule:
    """The second input has all dims but the one it is written into at an index."""
    dim = call.dim(call["dim"])
    dims = names(len(call.shape))
    part = dims[:dim] + dims[dim + 1 :]
    sizes = sizes_of(dims, call.shape)
    return call.rule([dims, part], dims, sizes, whole=dims[dim], passes=[(0, 1)], flops=0.0)


def _slice_scatter(call: Call) -> Rule:
    """The second input has the size of the slice in the dim it is written into."""
    dim = call.dim(call["dim"])
    dims = names(len(call.shape))
    part: list[Dim] = [("part",) if i == dim else factor for i, factor in enumerate(dims)]
    sizes = sizes_of(dims, call.shape) | {"part": call.shapes[1][dim]}
    whole = ["part", *dims[dim]]
    return call.rule([dims, part], dims, sizes, whole=whole, passes=[(0, 1)], flops=0.0)


def _diagonal_scatter(call: Call) -> Rule:
    """The diagonal of two dims stands last in the second input."""
    held = {call.dim(call["dim1"]), call.dim(call["dim2"])}
    dims = names(len(call.shape))
    part: list[Dim] = [*(dim for i, dim in enumerate(dims) if i not in held), ("part",)]
    sizes = sizes_of(dims, call.shape) | {"part": call.shapes[1][-1]}
    whole = ["part", *(f"d{i}" for i in held)]
    return call.rule([dims, part], dims, sizes, whole=whole, passes=[(0, 1)], flops=0.0)


def _added(call: Call) -> Rule:
    """The rows of a source added to, or put in the place of, those that an index names."""
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    sizes = sizes_of(out, call.shape) | {"j": math.prod(call.shapes[1])}
    index: list[Dim] = [("j",)] * len(call.shapes[1])
    source: list[Dim] = [("j",) if i == dim else factor for i, factor in enumerate(out)]
    whole = ["j", f"d{dim}"]
    inputs = [out, index, source][: len(call.shapes)]
    return call.rule(inputs, out, sizes, whole=whole, saved=Saved((1, 2)))


register_rule(aten("slice narrow"), _slice, traits=VIEW)
register_rule("aten.select", _select, traits=VIEW)
register_rule("aten.index_select", _index_select)
register_rule("aten.gather", _gather)
register_rule("aten.index", _index)
register_rule(aten("scatter.src scatter.value scatter_add"), _scatter)
register_rule("aten.select_scatter", _select_scatter)
register_rule("aten.slice_scatter", _slice_scatter)
register_rule("aten.diagonal_scatter", _diagonal_scatter)
register_rule(aten("index_add index_copy"), _added)
register_rule("aten.one_hot", "... -> ... classes!")
