"""Bring tensors that are cut over some ranks to one of them whole, and send their pieces back.

    pieces of parameters and gradients ──▶ the owner of each ──update──▶ pieces of parameters

Each parameter has an owner among the ranks that hold its pieces. It alone keeps the states of an
optimizer, and has memory for the whole parameter and gradient during a step. All pieces for one
owner travel in one message, and so do those that it sends back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch.communication import moves_through_host
from autopar._torch.tensors import copy_each, local_of
from autopar.collectives.point_to_point import exchange_pieces, uses_messages
from autopar.collectives.torch_operators import movable
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.placements import from_placements
from autopar.runtime.parameters.placing import narrow_to, read_piece


@dataclass(frozen=True)
class PieceView:
    """The place of this rank in the mesh of a DTensor, and the layout of the DTensor there."""

    mesh: Mesh
    rank: int
    layout: Layout

    @classmethod
    def of(cls, value: DTensor) -> PieceView:
        """Return the place of this rank, which holds a piece of `value`."""
        mesh, coordinate = (
            Mesh.from_device_mesh(value.device_mesh),
            value.device_mesh.get_coordinate(),
        )
        assert coordinate is not None
        layout = from_placements(value.placements, mesh, value.ndim)
        return cls(mesh, mesh.rank(dict(zip(mesh.names, coordinate))), layout)

    @property
    def axes(self) -> Axes:
        """Return the axes over which the DTensor is cut, in the order of the mesh."""
        return tuple(axis for axis in self.mesh if axis in self.layout.axes and self.mesh[axis] > 1)

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks of the mesh that hold the pieces of the DTensor, this one among them."""
        return next(ranks for ranks in self.mesh.groups(self.axes) if self.rank in ranks)


class OwnedTensor:
    """A parameter of which ranks hold pieces, and the whole tensor that its owner updates."""

    def __init__(self, parameter: DTensor, owner: int) -> None:
        """`owner`: the place of the owner among the ranks that hold pieces."""
        view = PieceView.of(parameter)
        shape, members = tuple(parameter.shape), view.members
        self.parameter, self.owner = parameter, owner
        self.is_here = members[owner] == view.rank
        self.shapes = [view.layout.local_shape(shape, view.mesh, member) for member in members]
        self._boxes = [view.layout.boxes(shape, view.mesh, member) for member in members]
        self._pieces = [
            partial(read_piece, layout=view.layout, shape=shape, mesh=view.mesh, rank=member)
            for member in members
        ]
        self._dim = view.layout.parts[0][0] if view.layout.parts else 0
        # Elsewhere a tensor without memory stands for it, which never has a gradient.
        device = local_of(parameter).device if self.is_here else torch.device("meta")
        empty = [torch.empty(shape, dtype=parameter.dtype, device=device) for _ in range(2)]
        self.whole, self._gradient = nn.Parameter(empty[0]), empty[1]
        self.set_memory(is_needed=False)

    def set_memory(self, *, is_needed: bool) -> None:
        """Give the whole parameter and gradient memory, or take it away."""
        if self.is_here:
            for tensor in (self.whole, self._gradient):
                tensor.untyped_storage().resize_(tensor.nbytes if is_needed else 0)
            self.whole.grad = None

    def fill(self, member: int, value: Tensor, gradient: Tensor | None) -> None:
        """Copy a member's pieces of the parameter and its gradient to where they belong."""
        pairs = [(self.whole.detach(), value)]
        if gradient is not None:
            self.whole.grad = self._gradient
            pairs.append((self._gradient, gradient))
        boxes = self._boxes[member]
        for whole, piece in pairs:
            parts = [piece]
            if len(boxes) > 1:
                parts = list(piece.split([bounds[self._dim][1] for bounds in boxes], self._dim))
            copy_each([narrow_to(whole, bounds) for bounds in boxes], parts)

    def piece(self, member: int) -> Tensor:
        """Return a member's piece of the whole parameter."""
        return self._pieces[member](partial(narrow_to, self.whole.detach()))


class OwnerExchange:
    """Parameters of one dtype and device that are cut over one group of ranks."""

    def __init__(
        self,
        parameters: Sequence[DTensor],
        group: dist.ProcessGroup,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Choose owners so that each has about as many elements as the others.

        `guard` returns the context of code in which ranks wait for one another."""
        view, device = PieceView.of(parameters[0]), local_of(parameters[0]).device
        self._group, self._device, self._guard = group, device, guard
        self._member, self._count = view.members.index(view.rank), len(view.members)
        on_host = device.type == "cuda" and moves_through_host(group)
        self._carrier = torch.device("cpu") if on_host else device
        loads, owners = [0] * self._count, dict[int, int]()
        by_size = sorted(range(len(parameters)), key=lambda at: -parameters[at].numel())
        for at in by_size:
            owners[at] = loads.index(min(loads))
            loads[owners[at]] += parameters[at].numel()
        self.tensors = [OwnedTensor(p, owners[at]) for at, p in enumerate(parameters)]
        self._active: list[OwnedTensor] = []

    @torch.no_grad()
    def gather(self, *, has_gradients: bool, present: Container[int] | None = None) -> None:
        """Fill the whole tensors of their owners with the values of parameters, and gradients.

        A parameter without a gradient is left out, if gradients are gathered; and one whose id is
        not in `present` (None: all are)."""
        self._active = [
            tensor
            for tensor in self.tensors
            if (present is None or id(tensor.parameter) in present)
            and (not has_gradients or tensor.parameter.grad is not None)
        ]
        sent: list[list[Tensor]] = [[] for _ in range(self._count)]
        for tensor in self._active:
            sent[tensor.owner].append(local_of(tensor.parameter))
            if has_gradients and tensor.parameter.grad is not None:
                sent[tensor.owner].append(local_of(tensor.parameter.grad))
        here = [tensor for tensor in self._active if tensor.is_here]
        shapes = [
            [tensor.shapes[member] for tensor in here for _ in range(1 + has_gradients)]
            for member in range(self._count)
        ]
        received = self._exchange(sent, shapes)
        for tensor in here:
            tensor.set_memory(is_needed=True)
        for member, row in enumerate(received):
            pieces = iter(row)
            for tensor in here:
                tensor.fill(member, next(pieces), next(pieces) if has_gradients else None)

    @torch.no_grad()
    def scatter(self) -> None:
        """Send the updated parameters back in pieces."""
        here = [tensor for tensor in self._active if tensor.is_here]
        sent = [[tensor.piece(member) for tensor in here] for member in range(self._count)]
        by_owner = [
            [tensor for tensor in self._active if tensor.owner == owner]
            for owner in range(self._count)
        ]
        shapes = [[tensor.shapes[self._member] for tensor in owned] for owned in by_owner]
        for owned, pieces in zip(by_owner, self._exchange(sent, shapes)):
            if owned:
                copy_each([local_of(tensor.parameter) for tensor in owned], pieces)

    def release(self) -> None:
        """Free the whole tensors."""
        for tensor in self.tensors:
            tensor.set_memory(is_needed=False)

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send tensors to each member; return those that each has sent, which have these shapes."""
        numels = [[torch.Size(shape).numel() for shape in row] for row in shapes]
        dtype = self.tensors[0].parameter.dtype
        flat = [self._joined(row, dtype) for row in sent]
        received = [torch.empty(sum(row), dtype=dtype, device=self._carrier) for row in numels]
        with self._guard():
            if uses_messages(self._carrier, self._group):
                exchange_pieces(flat, received, self._member, self._group)
            else:
                to, from_ = ([movable(tensor) for tensor in row] for row in (received, flat))
                dist.all_to_all(to, from_, group=self._group)
        return [
            [piece.view(shape) for piece, shape in zip(row.to(self._device).split(lengths), rows)]
            for row, lengths, rows in zip(received, numels, shapes)
        ]

    def _joined(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
        joined = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
        return joined.to(self._carrier)
