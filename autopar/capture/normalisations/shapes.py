"""Operators that only change shapes: one form for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.draft import Draft, argument, shape_of

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
_TRANSPOSES = (
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.swapaxes.default,
    aten.transpose.int,
)


def canonical_reshapes(draft: Draft) -> None:
    """view, flatten, unflatten, ... become reshape: legal whatever the strides of a local value."""
    for node in draft.calls(*_RESHAPES):
        shape = list(shape_of(node))
        if node.target is not aten.reshape.default or node.args[1] != shape:
            draft.replace(node, aten.reshape.default, node.args[0], shape)


def canonical_transposes(draft: Draft) -> None:
    """t, T, mT, swapaxes and movedim become transpose or permute."""
    for node in draft.calls(*_TRANSPOSES, aten.movedim.int, aten.movedim.intlist):
        x = node.args[0]
        rank = len(shape_of(x))
        if node.target in (aten.t.default, aten.numpy_T.default) and rank < 2:
            draft.substitute(node, x)  # type: ignore[arg-type]
        elif node.target in (aten.t.default, aten.mT.default) or rank == 2:
            draft.replace(node, aten.transpose.int, x, rank - 2, rank - 1)
        elif node.target is aten.numpy_T.default:
            draft.replace(node, aten.permute.default, x, list(reversed(range(rank))))
        elif node.target in (aten.swapaxes.default, aten.transpose.int):
            first, second = (dim % max(rank, 1) for dim in node.args[1:])  # type: ignore[operator]
            if node.args[1:] != (first, second):
                draft.replace(node, aten.transpose.int, x, first, second)
        else:
            draft.replace(node, aten.permute.default, x, _moved(node, rank))


def canonical_expands(draft: Draft) -> None:
    """expand_as and broadcast_to become expand; sizes are written out."""
    for node in draft.calls(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default):
        shape = list(shape_of(node))
        if node.target is not aten.expand.default or node.args[1] != shape:
            draft.replace(node, aten.expand.default, node.args[0], shape)


def canonical_slices(draft: Draft) -> None:
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


def merge_reshapes(draft: Draft) -> None:
    """A reshape of a reshape is one reshape."""
    for node in draft.calls(aten.reshape.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target is aten.reshape.default:
            node.args = (source.args[0], node.args[1])


def undo_permutations(draft: Draft) -> None:
    """A permutation of dims and its inverse after it are nothing."""
    for node in draft.calls(aten.transpose.int, aten.permute.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target in (aten.transpose.int, aten.permute.default):
            inner, outer = permutation(source), permutation(node)
            if [inner[dim] for dim in outer] == list(range(len(inner))):
                draft.substitute(node, source.args[0])  # type: ignore[arg-type]


def permutation(node: fx.Node) -> list[int]:
    """The dims of the input in the order of the output, for a transpose or a permute."""
    rank = len(shape_of(node))
    if node.target is aten.permute.default:
        return [dim % rank for dim in argument(node, "dims")]
    dims = list(range(rank))
    if rank:
        first, second = argument(node, "dim0") % rank, argument(node, "dim1") % rank
        dims[first], dims[second] = dims[second], dims[first]
    return dims


def _moved(node: fx.Node, rank: int) -> list[int]:
    """The permutation that a movedim stands for."""
    source, destination = argument(node, "source"), argument(node, "destination")
    if isinstance(source, int):
        source, destination = [source], [destination]
    to = {d % rank: s % rank for s, d in zip(source, destination)}
    rest = iter(dim for dim in range(rank) if dim not in to.values())
    return [to[dim] if dim in to else next(rest) for dim in range(rank)]
