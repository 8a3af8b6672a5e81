"""Exchange tensors of which each rank of a group has a piece: gather them, or sum and cut them.

    gather     this rank's pieces ──▶ full tensors
    scatter    full terms of a sum ──▶ this rank's pieces of the sum

Collectives move one flat buffer that the pieces are copied to and from (`flat_buffers.py`). gloo
stages a copy of that buffer, and sums by an all-reduce. So on a host each rank sends the others
their pieces by messages, which moves half as much for a sum. Large pieces go straight from where
they lie to where they belong, small ones together in a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import (
    all_gather_single,
    moves_through_host,
    reduce_scatter_single,
    wait_for,
)
from autopar._torch.tensors import copy_each
from autopar.collectives.point_to_point import ScatteredSum, send_and_receive, uses_messages
from autopar.collectives.torch_operators import movable
from autopar.cost.bucket_prices import is_sent_directly
from autopar.runtime.backends.host_copies import Copied, HostLink
from autopar.runtime.parameters.flat_buffers import Packing, TensorPieces, pack_tensors


@dataclass
class PendingExchange:
    """Messages, or a collective, and what is done when they are here."""

    works: list[Any] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # what they read and write
    copied: Copied | None = None  # from the host
    then: Callable[[], object] | None = None

    def wait(self) -> None:
        for work in self.works:
            wait_for(work)
        if self.copied is not None:
            self.copied.precede()
        if self.then is not None:
            self.then()
        self.works, self.held, self.copied, self.then = [], [], None, None


class PieceExchange:
    """Of tensors that are cut over one group."""

    def __init__(
        self,
        tensors: Sequence[TensorPieces],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        has_straight: bool = True,
    ) -> None:
        """`has_straight`: large pieces may go straight, where that is better."""
        self.group, self._own, self._dtype = group, tensors[0].own, dtype
        self._members = len(tensors[0].bounds)
        self._sends_itself = uses_messages(device, group)
        # What lies on a GPU and is moved by gloo travels through the host.
        on_host = device.type == "cuda" and moves_through_host(group)
        self._carrier = torch.device("cpu") if on_host else device
        is_better = self._sends_itself and has_straight
        is_large = [
            is_better
            and is_sent_directly(one.shape, one.dim, math.prod(one.shape_of(0)) * dtype.itemsize)
            for one in tensors
        ]
        self._large = [at for at, large in enumerate(is_large) if large]
        self._small = [at for at, large in enumerate(is_large) if not large]
        self._tensors = tensors
        small = [tensors[at] for at in self._small]
        self._packing = Packing(small, device) if small else None
        own = [math.prod(tensors[at].shape_of(self._own)) for at in self._large]
        self._numels = own  # of the large ones
        self._packed_length = self._packing.length if self._packing is not None else 0
        self.length = sum(own) + self._packed_length  # of this rank's part, in elements
        self._views: list[list[Tensor]] = []  # of the targets of `gather`, and what is packed
        self._packed_views: list[Tensor] = []

    @property
    def packing(self) -> Packing:
        """Of all tensors, where none goes straight."""
        assert self._packing is not None
        assert not self._large
        return self._packing

    @property
    def is_direct(self) -> bool:
        """Whether a gather writes where the tensors are as soon as it begins."""
        return not self._small or self._sends_itself or self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        """Whether the buffer is the one tensor itself."""
        return self._packing is not None and self._packing.is_in_place and not self._large

    @property
    def is_full(self) -> bool:
        """Whether this rank's part has no room left."""
        return self._packing is None or self._packing.is_full

    def own(self, part: Tensor) -> list[Tensor]:
        """This rank's piece of each tensor, in its part of the sum."""
        *large, rest = part.split_with_sizes([*self._numels, self._packed_length])
        small = self._packing.own(rest) if self._packing is not None else []
        shapes = [self._tensors[at].shape_of(self._own) for at in self._large]
        found = dict(zip(self._small, small))
        found |= {at: one.view(s) for at, one, s in zip(self._large, large, shapes)}
        return [found[at] for at in range(len(self._tensors))]

    def gather(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], link: HostLink | None = None
    ) -> PendingExchange:
        """Fill `targets`; they have memory when it ends, if `is_direct` when it begins.

        `link`: by which `sources` come from the host.
        """
        way = PendingExchange()
        if self._large:
            self._views = self._views or self._rows([targets[at] for at in self._large])
            own = self._views[self._own]
            put = copy_each if link is None else link.up
            put(own, [sources[at].reshape(-1) for at in self._large])
            self._send_and_receive(way, [own] * self._members, self._views)
        if self._packing is not None:
            some = [targets[at] for at in self._small]
            self._gather_packed(way, some, [sources[at] for at in self._small], link)
        return way

    def _gather_packed(
        self,
        way: PendingExchange,
        targets: list[Tensor],
        sources: list[Tensor],
        link: HostLink | None,
    ) -> None:
        packing = self._packing
        assert packing is not None
        if self._is_in_place and self._carrier == targets[0].device:
            flat = targets[0].view(-1)
        else:
            flat = torch.empty(packing.numel, dtype=self._dtype, device=self._carrier)

            def put() -> None:
                self._packed_views = self._packed_views or packing.of(targets)
                copy_each(self._packed_views, packing.inside(flat))

            way.then = put
        part = packing.own_part(flat)  # where it belongs: one buffer, not two
        if link is None:
            copy_each(packing.own(part), sources)
        with nullcontext() if link is None else link.beside():
            if link is not None:
                way.copied = link.up(packing.own(part), sources)
                way.copied.precede()
            if self._sends_itself:
                parts = flat.view(self._members, -1)
                self._send_and_receive(way, [[part]] * self._members, [[one] for one in parts])
                return
            way.held += [flat, part]
            whole, own = movable(flat), movable(part)
            way.works.append(all_gather_single(whole, own, group=self.group, async_op=True))

    def scatter(
        self, terms: Sequence[Tensor], flat: Tensor | None = None
    ) -> tuple[Tensor, PendingExchange]:
        """Of the sum of all ranks' terms this rank's part, which is there when all have come.

        `flat`: the terms, as they are packed.
        """
        if flat is None and self._packing is not None:
            flat = pack_tensors(self._packing, [terms[at] for at in self._small], self._dtype)
        like = terms[0] if flat is None else flat
        part, way = like.new_empty(self.length, dtype=self._dtype), PendingExchange()
        if not self._sends_itself:
            assert flat is not None
            self._sum_by_collective(way, part, flat)
            return part, way
        sent = self._rows([terms[at].contiguous() for at in self._large])
        for row, packed_part in zip(sent, () if flat is None else flat.view(self._members, -1)):
            row.append(packed_part)
        way.then = ScatteredSum(sent, part, self._own, self.group).wait
        return part, way

    def _rows(self, large: Sequence[Tensor]) -> list[list[Tensor]]:
        """The pieces of large tensors, member by member, each one stretch of memory."""
        by_tensor = []
        for one, cut in zip(large, [self._tensors[at] for at in self._large]):
            pieces = cut.rows(one) if cut.is_even else [one.narrow(cut.dim, *b) for b in cut.bounds]
            by_tensor.append([piece.view(-1) for piece in pieces])
        return [list(row) for row in zip(*by_tensor)] or [[] for _ in range(self._members)]

    def _send_and_receive(
        self,
        way: PendingExchange,
        sent: Sequence[Sequence[Tensor]],
        received: Sequence[Sequence[Tensor]],
    ) -> None:
        way.works += send_and_receive(sent, received, self._own, self.group)
        way.held += [one for row in (*sent, *received) for one in row]

    def _sum_by_collective(self, way: PendingExchange, part: Tensor, flat: Tensor) -> None:
        carried, own = flat.to(self._carrier), part.to(self._carrier)
        way.held += [carried, own]
        way.works.append(reduce_scatter_single(own, carried, group=self.group, async_op=True))
        if own is not part:
            way.then = lambda: part.copy_(own)
