"""Operators that only change shapes: one form for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import Site, rewrites
from autopar.strategies.registry import permutation

aten = torch.ops.aten


@rewrites(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.ravel.default,
)
def canonical_reshapes(call: Site) -> fx.Node | None:
    """view, flatten, unflatten, ... become reshape: legal whatever the strides of a local value."""
    return call.canonical(aten.reshape.default, call.inputs[0], list(call.shape))


@rewrites()
def canonical_transposes(call: Site) -> fx.Node | None:
    """Operators that permute dims become transpose, or permute if it takes more; or nothing."""
    order = permutation(call.node)
    if order is None or call.node.target is aten.permute.default:
        return None
    (x,) = call.inputs
    return x if order == sorted(order) else call.canonical(*as_call(x, order))


def as_call(x: fx.Node, order: list[int]) -> tuple[Any, ...]:
    """The one form of an operator that permutes dims, and its arguments."""
    moved = [dim for dim, source in enumerate(order) if dim != source]
    if len(moved) == 2:
        return aten.transpose.int, x, *moved
    return aten.permute.default, x, order


@rewrites(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def canonical_expands(call: Site) -> fx.Node | None:
    """expand_as and broadcast_to become expand; sizes are written out."""
    return call.canonical(aten.expand.default, call.inputs[0], list(call.shape))


@rewrites(aten.repeat.default)
def repeats_are_expands(call: Site) -> fx.Node | None:
    """Copies of a dim are a dim of their own before it, which a reshape merges with it."""
    (x,), repeats, shape = call.inputs, call["repeats"], call.shapes[0]
    shape = (*[1] * (len(repeats) - len(shape)), *shape)
    apart, expanded = list[int](), list[int]()
    for times, size in zip(repeats, shape, strict=True):
        if times > 1 and size > 1:
            apart.append(1)
            expanded.append(times)
        apart.append(size)
        expanded.append(size if size > 1 else times * size)
    x = call.make(aten.reshape.default, x, apart)
    x = call.make(aten.expand.default, x, expanded)
    return call.make(aten.reshape.default, x, list(call.shape))


@rewrites(aten.slice.Tensor, aten.narrow.default)
def canonical_slices(call: Site) -> fx.Node | None:
    """Slices have dim, start and end as plain sizes; narrow is a slice."""
    dim = call.dim(call["dim"])
    size, step = call.shapes[0][dim], call.get("step", 1)
    start = call["start"] or 0
    start = min(start + size if start < 0 else start, size)
    if "length" in call.arguments:
        end = start + call["length"]
    else:
        end = size if call["end"] is None else call["end"]
        end = max(min(end + size if end < 0 else end, size), start)
    place = (dim, start, end) if step == 1 else (dim, start, end, step)
    return call.canonical(aten.slice.Tensor, call.inputs[0], *place)


@rewrites(aten.select.int)
def canonical_selections(call: Site) -> fx.Node | None:
    """Selections have dim and index as plain numbers."""
    dim = call.dim(call["dim"])
    return call.canonical(aten.select.int, call["self"], dim, call["index"] % call.shapes[0][dim])


@rewrites(aten.reshape.default)
def merge_reshapes(call: Site) -> None:
    """A reshape of a reshape is one reshape."""
    (source,) = call.inputs
    if source.target is aten.reshape.default:
        call.node.args = (source.args[0], call["shape"])


@rewrites(aten.transpose.int, aten.permute.default)
def undo_permutations(call: Site) -> fx.Node | None:
    """A permutation of dims and its inverse after it are nothing."""
    (source,) = call.inputs
    inner, outer = permutation(source), permutation(call.node)
    if inner is None or outer is None or [inner[dim] for dim in outer] != sorted(inner):
        return None
    return source.all_input_nodes[0]
