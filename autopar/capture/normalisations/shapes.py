"""Operators that only change shapes: one form for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of

aten = torch.ops.aten

_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.ravel.default,
)
_SWAPS = (
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.transpose.int,
)
_MOVED = (
    aten.movedim.int,
    aten.movedim.intlist,
    aten.moveaxis.int,
    aten.moveaxis.intlist,
)
PERMUTATIONS = (*_SWAPS, *_MOVED, aten.permute.default)


def canonical_reshapes(draft: GraphBuilder) -> None:
    """view, flatten, unflatten, ... become reshape: legal whatever the strides of a local value."""
    for node in draft.calls(*_RESHAPES):
        shape = list(shape_of(node))
        if node.target is not aten.reshape.default or node.args[1] != shape:
            draft.replace(node, aten.reshape.default, node.args[0], shape)


def canonical_transposes(draft: GraphBuilder) -> None:
    """Operators that permute dims become transpose, or permute if it takes more; or nothing."""
    for node in draft.calls(*_SWAPS, *_MOVED):
        x, order = node.args[0], permutation(node)
        assert isinstance(x, fx.Node)
        target, *arguments = as_call(x, order)
        if order == sorted(order):
            draft.substitute(node, x)
        elif (node.target, node.args) != (target, tuple(arguments)) or node.kwargs:
            draft.replace(node, target, *arguments)


def as_call(x: fx.Node, order: list[int]) -> tuple[Any, ...]:
    """The one form of an operator that permutes dims, and its arguments."""
    moved = [dim for dim, source in enumerate(order) if dim != source]
    if len(moved) == 2:
        return aten.transpose.int, x, *moved
    return aten.permute.default, x, order


def canonical_expands(draft: GraphBuilder) -> None:
    """expand_as and broadcast_to become expand; sizes are written out."""
    for node in draft.calls(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default):
        shape = list(shape_of(node))
        if node.target is not aten.expand.default or node.args[1] != shape:
            draft.replace(node, aten.expand.default, node.args[0], shape)


def canonical_slices(draft: GraphBuilder) -> None:
    """Slices have dim, start and end as plain sizes; narrow is a slice."""
    for node in draft.calls(aten.slice.Tensor, aten.narrow.default):
        x = node.args[0]
        dim = argument(node, "dim") % len(shape_of(x))
        size, step = shape_of(x)[dim], 1
        start = argument(node, "start") or 0
        start = min(start + size if start < 0 else start, size)
        if node.target is aten.narrow.default:
            end = start + argument(node, "length")
        else:
            end, step = argument(node, "end"), argument(node, "step")
            end = size if end is None else end
            end = max(min(end + size if end < 0 else end, size), start)
        place: tuple[Any, ...] = (dim, start, end) if step == 1 else (dim, start, end, step)
        if node.target is not aten.slice.Tensor or node.args[1:] != place or node.kwargs:
            draft.replace(node, aten.slice.Tensor, x, *place)
    for node in draft.calls(aten.select.int):
        x, dim, index = (argument(node, name) for name in ("self", "dim", "index"))
        dim %= len(shape_of(x))
        index %= shape_of(x)[dim]
        if node.args != (x, dim, index):
            draft.replace(node, aten.select.int, x, dim, index)


def merge_reshapes(draft: GraphBuilder) -> None:
    """A reshape of a reshape is one reshape."""
    for node in draft.calls(aten.reshape.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target is aten.reshape.default:
            node.args = (source.args[0], node.args[1])


def undo_permutations(draft: GraphBuilder) -> None:
    """A permutation of dims and its inverse after it are nothing."""
    for node in draft.calls(aten.transpose.int, aten.permute.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target in (aten.transpose.int, aten.permute.default):
            inner, outer = permutation(source), permutation(node)
            if [inner[dim] for dim in outer] == list(range(len(inner))):
                draft.substitute(node, source.args[0])  # type: ignore[arg-type]


def permutation(node: fx.Node) -> list[int]:
    """The dims of the input in the order of the output, of an operator that permutes dims."""
    rank, (_, *names) = len(shape_of(node)), node.target._schema.arguments  # type: ignore[union-attr]
    given = [argument(node, declared.name) for declared in names]
    places = [[d % max(rank, 1) for d in ([g] if isinstance(g, int) else g)] for g in given]
    if node.target is aten.permute.default:
        return places[0]
    if node.target is aten.numpy_T.default:
        return list(reversed(range(rank)))
    if node.target in _MOVED:
        source, destination = places
        return _moved(source, destination, rank)
    # Two dims change places: those named, or the last two.
    order = list(range(rank))
    first, second = (place for (place,) in places) if places else (rank - 2, rank - 1)
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _moved(source: list[int], destination: list[int], rank: int) -> list[int]:
    """The permutation that puts each of the `source` dims at its `destination`."""
    to = dict(zip(destination, source))
    rest = iter(dim for dim in range(rank) if dim not in source)
    return [to[dim] if dim in to else next(rest) for dim in range(rank)]
