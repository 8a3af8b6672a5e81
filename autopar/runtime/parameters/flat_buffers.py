"""Lay out tensors that are cut over the ranks of a group in one flat buffer.

    member 0: its piece of a, its piece of b, room │ member 1: its piece of a, ... │ ...

An all-gather fills such a buffer with the parts of all members, and a reduce-scatter gives each
member its part of the sum. All parts are as long as the longest. Nothing here communicates.
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
    """The pieces of one tensor that the members of a group hold."""

    shape: tuple[int, ...]  # of all pieces together
    dim: int  # that is cut
    bounds: tuple[tuple[int, int], ...]  # start and length of each member's piece
    member: int  # the place of this rank in the group

    @classmethod
    def between(
        cls,
        coarse: Layout,
        fine: Layout,
        shape: Sequence[int],
        *,
        mesh: Mesh,
        rank: int,
        axes: Sequence[str],
    ) -> TensorPieces:
        """Return the pieces by which `fine` cuts a dim of a tensor further than `coarse` does.

        `shape` is the full tensor's; `axes`, in the order of the mesh, span the group of `rank`.
        """
        dim = next((d for d, cut in enumerate(coarse.dims) if cut != fine.dims[d]), 0)
        members = next(ranks for ranks in mesh.groups(tuple(axes)) if rank in ranks)
        local_shape, first, bounds = coarse.local_shape(shape, mesh, rank), 0, []
        if shape:
            first = coarse.bounds_in(dim, shape, mesh, rank)[0]
        for member in members:
            start, length = fine.bounds_in(dim, shape, mesh, member) if shape else (0, 1)
            bounds.append((start - first, length))
        return cls(local_shape, dim, tuple(bounds), members.index(rank))

    def shape_of(self, member: int) -> tuple[int, ...]:
        """Return the shape of a member's piece."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.bounds[member][1], *self.shape[self.dim + 1 :])

    @cached_property
    def are_contiguous(self) -> bool:
        """Return whether each piece lies in one stretch of memory."""
        return math.prod(self.shape[: self.dim]) == 1

    @cached_property
    def are_even(self) -> bool:
        """Return whether all pieces are equally long and lie in the order of the members."""
        length = self.bounds[0][1]
        return all(bound == (at * length, length) for at, bound in enumerate(self.bounds))

    def split_evenly(self, tensor: Tensor) -> Tensor:
        """View a tensor with equal pieces as a row for each member, flat if contiguous."""
        members, length = len(self.bounds), self.bounds[0][1]
        if self.are_contiguous:
            return tensor.view(members, tensor.numel() // members)
        return tensor.unflatten(self.dim, (members, length)).movedim(self.dim, 0)


class Packing:
    """The places in one flat buffer of several tensors that are cut over one group."""

    def __init__(self, tensors: Sequence[TensorPieces], device: torch.device) -> None:
        """Lay out `tensors`, which lie on `device`."""
        # A GPU copies many stretches of memory at once, but strided ones one by one.
        self._splits_evenly = device.type == "cpu" and all(t.are_even and t.shape for t in tensors)
        self.tensors, local = tensors, tensors[0].member
        self.members = len(tensors[0].bounds)
        shapes = [[tensor.shape_of(m) for tensor in tensors] for m in range(self.members)]
        numels = [[math.prod(shape) for shape in row] for row in shapes]
        self.length = max(map(sum, numels))  # of each part
        self.numel = self.members * self.length
        # All pieces with elements, member by member: where they are cut out, and their shapes.
        self._splits: list[int] = []
        self._filled: list[tuple[int, int, int]] = []  # which split, which tensor, which member
        self._shapes: list[tuple[int, ...] | None] = []  # None: flat
        for member, row in enumerate(numels):
            for tensor, numel in enumerate(row):
                if numel:
                    is_flat = tensors[tensor].are_contiguous
                    self._filled.append((len(self._splits), tensor, member))
                    self._shapes.append(None if is_flat else shapes[member][tensor])
                    self._splits.append(numel)
            self._splits.append(self.length - sum(row))
        self._local_shapes, self._local_numels = shapes[local], numels[local]

    @cached_property
    def is_in_place(self) -> bool:
        """Return whether the buffer is the memory of its only tensor."""
        tensors = self.tensors
        return len(tensors) == 1 and tensors[0].are_contiguous and tensors[0].are_even

    @cached_property
    def is_full(self) -> bool:
        """Return whether this member's part has no room left."""
        return sum(self._local_numels) == self.length

    def split_buffer(self, flat: Tensor) -> list[Tensor]:
        """View the pieces in a buffer, contiguous ones flat.

        On a host, where all pieces are equal, each view has those of one tensor as its rows."""
        if self._splits_evenly:
            columns = flat.view(self.members, self.length).split_with_sizes(self._local_numels, 1)
            return [
                column if tensor.are_contiguous else column.view(self.members, *shape)
                for column, tensor, shape in zip(columns, self.tensors, self._local_shapes)
            ]
        splits = flat.split_with_sizes(self._splits)
        return [
            splits[at] if shape is None else splits[at].view(shape)
            for (at, _, _), shape in zip(self._filled, self._shapes)
        ]

    def split_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """View the pieces of contiguous tensors as `split_buffer` views those of a buffer."""
        if self._splits_evenly:
            return [cut.split_evenly(tensor) for cut, tensor in zip(self.tensors, tensors)]
        pieces = []
        for (_, t, member), shape in zip(self._filled, self._shapes):
            cut = self.tensors[t]
            piece = tensors[t].narrow(cut.dim, *cut.bounds[member]) if cut.shape else tensors[t]
            pieces.append(piece.view(-1) if shape is None else piece)
        return pieces

    def split_part(self, part: Tensor) -> list[Tensor]:
        """View this member's piece of each tensor in its part of a buffer."""
        room = self.length - sum(self._local_numels)
        splits = part.split_with_sizes([*self._local_numels, room])
        return [piece.view(shape) for piece, shape in zip(splits, self._local_shapes)]

    def local_part(self, flat: Tensor) -> Tensor:
        """View this member's part of a buffer."""
        return flat.narrow(0, self.tensors[0].member * self.length, self.length)


def pack_tensors(packing: Packing, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all pieces of tensors in one buffer; a tensor that is such a buffer is not copied."""
    tensors = [tensor.contiguous() for tensor in tensors]
    if packing.is_in_place and tensors[0].dtype == dtype:
        return tensors[0].view(-1)
    flat = tensors[0].new_empty(packing.numel, dtype=dtype)
    copy_each(packing.split_buffer(flat), packing.split_tensors(tensors))
    return flat
