"""The movements on lists of tensors, one per rank of a mesh, in one process.

>>> mesh, layout = Mesh(a=2, b=2), Layout(("a", "b"))
>>> pieces = to_ranks(torch.arange(8.0), layout, mesh)
>>> pieces[3]
tensor([6., 7.])
>>> gathered = move(Movement("all_gather", ("b",), dim=0), pieces, mesh)
>>> gathered[3]
tensor([4., 5., 6., 7.])
>>> from_ranks(gathered, Layout("a"), mesh, (8,))
tensor([0., 1., 2., 3., 4., 5., 6., 7.])

Each function carries the backward that the table in `movement` defines, not the derivative of its
own forward: the gradients of replicas are replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar._torch.autograd import is_batched
from autopar.collectives.movement import Movement, join_parts, split_parts
from autopar.errors import ExecutionError, InvalidInput
from autopar.layout import Layout, chunk
from autopar.mesh import Mesh


def move(
    movement: Movement,
    values: Sequence[Tensor],
    mesh: Mesh,
    *,
    shape: Sequence[int] | None = None,
    layout: Layout | None = None,
    sums: torch.dtype | None = None,
) -> list[Tensor]:
    """Carry out `movement` on the tensors of all ranks, and return the results.

    The values are checked against `shape` of the whole tensor and `layout` before the movement, if
    both are given. Members of a group that receive the same data share its memory. `sums`: the
    dtype in which gradients travel; None: their own.
    """
    if layout is not None and shape is not None:
        expected = _local_shapes(layout, tuple(shape), mesh)
        for rank, (value, local_shape) in enumerate(zip(values, expected)):
            if value.shape != local_shape:
                raise ExecutionError(
                    "a value that is moved has the shape that its layout says",
                    got=f"shape {tuple(value.shape)} on rank {rank}; {layout} of {tuple(shape)} "
                    f"has {local_shape} there",
                    remedy="see that an operator of one's own returns what its rule says",
                )
    return list(_Move.apply(movement, mesh, sums, *values))


def to_ranks(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Cut a whole tensor into the pieces of all ranks: views, zeros behind a partial sum.

    The gradient assembles those of the pieces; replicas count once.
    """
    return list(_ToRanks.apply(layout, mesh, whole, None))


def from_ranks(
    values: Sequence[Tensor], layout: Layout, mesh: Mesh, shape: Sequence[int]
) -> Tensor:
    """Assemble the whole tensor: join cuts, sum partial sums, take the first of replicas.

    The gradient is cut likewise: every replica, and every term of a sum, receives all of it.
    """
    return _FromRanks.apply(layout, mesh, tuple(shape), *values)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, movement: Movement, mesh: Mesh, sums: torch.dtype | None, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.movement, ctx.mesh, ctx.sums = movement, mesh, sums
        if movement.kind == "identity":
            return tuple(value.view_as(value) for value in values)
        return _carry_out(movement, values, mesh, Tensor.detach)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.movement.reversed
        if torch.is_grad_enabled():  # this gradient has gradients of its own
            return None, None, None, *_Move.apply(back, ctx.mesh, ctx.sums, *grads)
        if back.kind == "identity":
            return None, None, None, *grads
        if ctx.sums is not None:  # what is given back is cast to the dtype of the values
            grads = tuple(grad.to(ctx.sums) for grad in grads)
        # Each rank has its gradient for itself: a leaf keeps it, and may add to it in place.
        return None, None, None, *_carry_out(back, grads, ctx.mesh, Tensor.clone)


class _ToRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: Layout, mesh: Mesh, whole: Tensor, own: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Cut the whole tensor; `own`, if given, copies each rank's piece."""
        ctx.layout, ctx.mesh, ctx.shape = layout, mesh, tuple(whole.shape)
        pieces = _cut(whole, layout, mesh)
        return pieces if own is None else tuple(map(own, pieces))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = _FromRanks.apply(ctx.layout.gradient, ctx.mesh, ctx.shape, *grads)
        return None, None, whole, None


class _FromRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: Layout, mesh: Mesh, shape: tuple[int, ...], *values: Tensor
    ) -> Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        return _assemble(values, layout, mesh, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_single_gradient(grad)
        # Every replica, and every term of a sum, has all of it.
        return None, None, None, *_ToRanks.apply(ctx.layout.gradient, ctx.mesh, grad, Tensor.clone)


def require_single_gradient(grad: Tensor) -> None:
    """Refuse several gradients at once for an output of a parallel module."""
    if is_batched(grad):
        raise InvalidInput(
            "a parallel module takes one gradient of each output at a time",
            got="torch.autograd.grad(..., is_grads_batched=True), or what calls that",
            remedy="torch.autograd.grad of one after another, with retain_graph=True",
        )


def _carry_out(
    movement: Movement, values: Sequence[Tensor], mesh: Mesh, another: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Carry out a collective in every group; `another` copies a result for other members."""
    collective = _COLLECTIVES[movement.kind]
    moved: list[Any] = [None] * len(values)
    seen = movement.seen
    for group in _groups(mesh, movement.axes):
        result = collective(
            [split_parts(values[rank], movement.parts) for rank in group], seen.dim, seen.to_dim
        )
        if isinstance(result, Tensor):
            result = [result, *(another(result) for _ in group[1:])]
        for rank, piece in zip(group, result):
            moved[rank] = join_parts(piece, movement.parts)
    return tuple(moved)


# What one group does: a tensor that all members receive, or one for each.


def _first_term(members: list[Tensor], dim: None, to_dim: None) -> list[Tensor]:
    first, *others = members
    return [first.view_as(first), *(torch.zeros_like(other) for other in others)]


def _all_reduce(members: list[Tensor], dim: None, to_dim: None) -> Tensor:
    total = members[0].clone(memory_format=torch.contiguous_format)
    for member in members[1:]:
        total += member
    return total


def _all_gather(members: list[Tensor], dim: int, to_dim: None) -> Tensor:
    return torch.cat(members, dim)


def _reduce_scatter(members: list[Tensor], dim: int, to_dim: None) -> list[Tensor]:
    total = _all_reduce(members, None, None)
    return [_piece(total, dim, len(members), at) for at in range(len(members))]


def _slice(members: list[Tensor], dim: int, to_dim: None) -> list[Tensor]:
    return [_piece(member, dim, len(members), at) for at, member in enumerate(members)]


def _all_to_all(members: list[Tensor], dim: int, to_dim: int) -> list[Tensor]:
    count = len(members)
    lengths = [chunk(members[0].shape[to_dim], count, at)[1] for at in range(count)]
    table = [member.split(lengths, to_dim) for member in members]
    return [torch.cat(column, dim) for column in zip(*table)]


_COLLECTIVES: dict[str, Callable[..., Tensor | list[Tensor]]] = {
    "first_term": _first_term,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "all_to_all": _all_to_all,
}


def _piece(value: Tensor, dim: int, parts: int, index: int) -> Tensor:
    # A copy: a view would keep the whole tensor alive.
    start, length = chunk(value.shape[dim], parts, index)
    return value.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _cut(whole: Tensor, layout: Layout, mesh: Mesh) -> tuple[Tensor, ...]:
    if parts := layout.parts:
        cut = _cut(split_parts(whole, parts), layout.with_part_dims(whole.shape)[0], mesh)
        return tuple(join_parts(piece, parts) for piece in cut)
    pieces = []
    for bounds, is_first in zip(*_bounds(layout, tuple(whole.shape), mesh)):
        piece = whole
        for dim, (start, length) in enumerate(bounds):
            if layout.dims[dim]:
                piece = piece.narrow(dim, start, length)
        if not is_first:
            piece = torch.zeros_like(piece)
        pieces.append(piece.view_as(piece) if piece is whole else piece)
    return tuple(pieces)


def _assemble(
    values: Sequence[Tensor], layout: Layout, mesh: Mesh, shape: tuple[int, ...]
) -> Tensor:
    """Undo the cuts one axis at a time, each over the ranks that still count."""
    if parts := layout.parts:
        inside, sizes = layout.with_part_dims(shape)
        pieces = [split_parts(value, parts) for value in values]
        return join_parts(_assemble(pieces, inside, mesh, sizes), parts)
    left, ranks = mesh, list(values)
    for axis in mesh.names:
        if layout.dim_of(axis) is None:
            groups = left.groups((axis,))
            if axis in layout.partial:
                ranks = [_all_reduce([ranks[r] for r in group], None, None) for group in groups]
            else:
                ranks = [ranks[group[0]] for group in groups]
            left = left.without(axis)
    for dim, axes in enumerate(layout.dims):
        for axis in reversed(axes):
            ranks = [torch.cat([ranks[r] for r in group], dim) for group in left.groups((axis,))]
            left = left.without(axis)
    (whole,) = ranks
    assert whole.shape == shape
    return whole.detach() if any(whole is value for value in values) else whole


@lru_cache(maxsize=1024)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return mesh.groups(axes)


@lru_cache(maxsize=4096)
def _bounds(
    layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> tuple[list[tuple[tuple[int, int], ...]], list[bool]]:
    """Return each rank's bounds, and whether it stands first on every partial axis."""
    ranks = range(mesh.size)
    return (
        [layout.local_bounds(shape, mesh, rank) for rank in ranks],
        [mesh.position(rank, layout.partial) == 0 for rank in ranks],
    )


@lru_cache(maxsize=4096)
def _local_shapes(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[tuple[int, ...]]:
    return [layout.local_shape(shape, mesh, rank) for rank in range(mesh.size)]
