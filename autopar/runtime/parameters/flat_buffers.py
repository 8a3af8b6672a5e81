"""Packing: how tensors that are cut over the ranks of a group lie in one flat buffer.

    member 0: its piece of a, its piece of b, room │ member 1: its piece of a, ... │ ...

An all-gather fills such a buffer with the parts of all members, and a reduce-scatter gives each
member its part of the sum. Parts are as long as the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autopar._torch.tensors import copy_each
from autopar.layout import Layout
from autopar.mesh import Mesh


@dataclass(frozen=True)
class TensorPieces:
    """How one tensor is cut over the members of a group."""

    shape: tuple[int, ...]  # of what lies in pieces with them
    dim: int  # that is cut
    bounds: tuple[tuple[int, int], ...]  # start and length of each member's piece
    own: int  # the place of this rank among the members

    @classmethod
    def between(
        cls,
        coarse: Layout,
        fine: Layout,
        shape: Sequence[int],
        mesh: Mesh,
        rank: int,
        axes: Sequence[str],
    ) -> TensorPieces:
        """From a layout to one that cuts a dim further, over `axes` in the order of the mesh."""
        dim = next((d for d, cut in enumerate(coarse.dims) if cut != fine.dims[d]), 0)
        members = next(ranks for ranks in mesh.groups(tuple(axes)) if rank in ranks)
        own, first, bounds = coarse.local_shape(shape, mesh, rank), 0, []
        if shape:
            first = coarse.bounds_in(dim, shape, mesh, rank)[0]
        for member in members:
            start, length = fine.bounds_in(dim, shape, mesh, member) if shape else (0, 1)
            bounds.append((start - first, length))
        return cls(own, dim, tuple(bounds), members.index(rank))

    def shape_of(self, member: int) -> tuple[int, ...]:
        """Of one member's piece."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.bounds[member][1], *self.shape[self.dim + 1 :])

    @cached_property
    def leads(self) -> bool:
        """Whether each piece lies in one stretch of memory."""
        return math.prod(self.shape[: self.dim]) == 1

    @cached_property
    def is_even(self) -> bool:
        """Whether the pieces are equal, and lie one after the other as the members do."""
        length = self.bounds[0][1]
        return all(bound == (at * length, length) for at, bound in enumerate(self.bounds))

    def rows(self, tensor: Tensor) -> Tensor:
        """The pieces of a tensor, which are equal, member by member; those that lie in one stretch
        as rows."""
        members, length = len(self.bounds), self.bounds[0][1]
        if self.leads:
            return tensor.view(members, tensor.numel() // members)
        return tensor.unflatten(self.dim, (members, length)).movedim(self.dim, 0)


class Packing:
    """Of several tensors that are cut over one group."""

    def __init__(self, tensors: Sequence[TensorPieces], device: torch.device) -> None:
        """`device`: where the tensors are."""
        # A GPU copies many stretches of memory at once, but strided ones one by one.
        self._is_together = device.type == "cpu" and all(t.is_even and t.shape for t in tensors)
        self.tensors, own = tensors, tensors[0].own
        self.members = len(tensors[0].bounds)
        shapes = [[one.shape_of(m) for one in tensors] for m in range(self.members)]
        numels = [[math.prod(shape) for shape in row] for row in shapes]
        self.length = max(map(sum, numels))  # of each part
        self.numel = self.members * self.length
        # All pieces with elements, member by member: where they are cut out, and their shapes.
        self._splits: list[int] = []
        self._filled: list[tuple[int, int, int]] = []  # which split, which tensor, which member
        self._shapes: list[tuple[int, ...] | None] = []  # None: as a row
        for member, row in enumerate(numels):
            for tensor, numel in enumerate(row):
                if numel:
                    self._filled.append((len(self._splits), tensor, member))
                    self._shapes.append(None if tensors[tensor].leads else shapes[member][tensor])
                    self._splits.append(numel)
            self._splits.append(self.length - sum(row))
        self._own_shapes, self._own_numels = shapes[own], numels[own]

    @cached_property
    def is_in_place(self) -> bool:
        """Whether the buffer is the one tensor itself."""
        return len(self.tensors) == 1 and self.tensors[0].leads and self.tensors[0].is_even

    @cached_property
    def is_full(self) -> bool:
        """Whether this member's part has no room left."""
        return sum(self._own_numels) == self.length

    def inside(self, flat: Tensor) -> list[Tensor]:
        """The pieces in a buffer; those that lie in one stretch, as a row. On a host, where all
        are equal, those of a tensor together, member by member."""
        if self._is_together:
            columns = flat.view(self.members, self.length).split_with_sizes(self._own_numels, 1)
            return [
                column if one.leads else column.view(self.members, *shape)
                for column, one, shape in zip(columns, self.tensors, self._own_shapes)
            ]
        found = flat.split_with_sizes(self._splits)
        return [
            found[at] if shape is None else found[at].view(shape)
            for (at, _, _), shape in zip(self._filled, self._shapes)
        ]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same pieces of the tensors themselves, which are contiguous."""
        if self._is_together:
            return [one.rows(tensor) for one, tensor in zip(self.tensors, tensors)]
        pieces = []
        for (_, t, member), shape in zip(self._filled, self._shapes):
            cut = self.tensors[t]
            piece = tensors[t].narrow(cut.dim, *cut.bounds[member]) if cut.shape else tensors[t]
            pieces.append(piece.view(-1) if shape is None else piece)
        return pieces

    def own(self, part: Tensor) -> list[Tensor]:
        """This member's piece of each tensor, in its part of a buffer."""
        rest = self.length - sum(self._own_numels)
        found = part.split_with_sizes([*self._own_numels, rest])
        return [piece.view(shape) for piece, shape in zip(found, self._own_shapes)]

    def own_part(self, flat: Tensor) -> Tensor:
        """This member's part of a buffer."""
        return flat.narrow(0, self.tensors[0].own * self.length, self.length)


def pack_tensors(packing: Packing, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors with all their pieces in one buffer: a tensor that is one already is not copied."""
    tensors = [tensor.contiguous() for tensor in tensors]
    if packing.is_in_place and tensors[0].dtype == dtype:
        return tensors[0].view(-1)
    flat = tensors[0].new_empty(packing.numel, dtype=dtype)
    copy_each(packing.inside(flat), packing.of(tensors))
    return flat
