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
    PendingWork,
    all_gather_single,
    moves_through_host,
    reduce_scatter_single,
    wait_for,
)
from autopar._torch.tensors import copy_each
from autopar.collectives.point_to_point import ScatteredSum, send_and_receive, uses_messages
from autopar.collectives.torch_operators import movable
from autopar.cost.bucket_prices import DIRECT_SEND_BYTES, is_sent_directly
from autopar.runtime.backends.host_copies import HostLink, PendingCopy
from autopar.runtime.parameters.flat_buffers import Packing, TensorPieces, pack_tensors


@dataclass
class PendingExchange:
    """Messages or a collective under way, and the work that follows their arrival."""

    works: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # that the works read and write
    copied: PendingCopy | None = None  # from the host
    on_arrival: Callable[[], object] | None = None

    def wait(self) -> None:
        for work in self.works:
            wait_for(work)
        if self.copied is not None:
            self.copied.precede()
        if self.on_arrival is not None:
            self.on_arrival()
        self.works, self.tensors, self.copied, self.on_arrival = [], [], None, None


def works_of(pending: PendingWork | None) -> list[Any]:
    """Return the works of torch that run for a collective or an exchange."""
    return pending.works if isinstance(pending, PendingExchange) else [pending]


class PieceExchange:
    """The collectives and messages that gather, or sum and cut, tensors over one group."""

    def __init__(
        self,
        tensors: Sequence[TensorPieces],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        may_go_straight: bool = True,
        most_copied: int = DIRECT_SEND_BYTES,
    ) -> None:
        """Prepare for pieces of one dtype; those of more than `most_copied` bytes go straight where
        allowed and faster."""
        self.group, self._member, self._dtype = group, tensors[0].member, dtype
        self._members = len(tensors[0].bounds)
        self._uses_messages = uses_messages(device, group)
        # What lies on a GPU and is moved by gloo travels through the host.
        on_host = device.type == "cuda" and moves_through_host(group)
        self._carrier = torch.device("cpu") if on_host else device
        has_straight = self._uses_messages and may_go_straight
        sizes = [math.prod(cut.shape_of(0)) * dtype.itemsize for cut in tensors]
        is_large = [
            has_straight and is_sent_directly(cut.shape, cut.dim, size, most_copied)
            for cut, size in zip(tensors, sizes)
        ]
        self._large = [at for at, large in enumerate(is_large) if large]
        self._small = [at for at, large in enumerate(is_large) if not large]
        self._tensors = tensors
        small = [tensors[at] for at in self._small]
        self._packing = Packing(small, device) if small else None
        self._large_numels = [math.prod(tensors[at].shape_of(self._member)) for at in self._large]
        self._packed_length = self._packing.length if self._packing is not None else 0
        # Of this rank's part, in elements.
        self.length = sum(self._large_numels) + self._packed_length
        self._large_views: list[list[Tensor]] = []  # of the targets of `gather`
        self._packed_views: list[Tensor] = []

    @property
    def packing(self) -> Packing:
        """Return the packing of all tensors; none of them may go straight."""
        assert self._packing is not None
        assert not self._large
        return self._packing

    @property
    def is_direct(self) -> bool:
        """Return whether a gather writes into its targets as soon as it begins."""
        return not self._small or self._uses_messages or self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        """Return whether the buffer is the memory of the only tensor."""
        return self._packing is not None and self._packing.is_in_place and not self._large

    @property
    def is_full(self) -> bool:
        """Return whether this rank's part has no room left."""
        return self._packing is None or self._packing.is_full

    def split_part(self, part: Tensor) -> list[Tensor]:
        """View this rank's piece of each tensor in its part of a sum."""
        *large, rest = part.split_with_sizes([*self._large_numels, self._packed_length])
        small = self._packing.split_part(rest) if self._packing is not None else []
        shapes = [self._tensors[at].shape_of(self._member) for at in self._large]
        pieces = dict(zip(self._small, small))
        pieces |= {at: flat.view(s) for at, flat, s in zip(self._large, large, shapes)}
        return [pieces[at] for at in range(len(self._tensors))]

    def gather(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], link: HostLink | None = None
    ) -> PendingExchange:
        """Begin to fill `targets` with the pieces of all ranks, of which `sources` are this one's.

        The targets need memory when the exchange ends, and if `is_direct` already when it begins.
        `link` brings the sources from the host; None if they lie on the device.
        """
        pending = PendingExchange()
        if self._large:
            large = [targets[at] for at in self._large]
            self._large_views = self._large_views or self._member_rows(large)
            local = self._large_views[self._member]
            copy = copy_each if link is None else link.upload
            copy(local, [sources[at].reshape(-1) for at in self._large])
            self._send_and_receive(pending, [local] * self._members, self._large_views)
        if self._packing is not None:
            small = [targets[at] for at in self._small]
            self._gather_packed(pending, small, [sources[at] for at in self._small], link)
        return pending

    def _gather_packed(
        self,
        pending: PendingExchange,
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

            def unpack() -> None:
                self._packed_views = self._packed_views or packing.split_tensors(targets)
                copy_each(self._packed_views, packing.split_buffer(flat))

            pending.on_arrival = unpack
        part = packing.local_part(flat)  # where it belongs: one buffer, not two
        if link is None:
            copy_each(packing.split_part(part), sources)
        with nullcontext() if link is None else link.on_stream():
            if link is not None:
                pending.copied = link.upload(packing.split_part(part), sources)
                pending.copied.precede()
            if self._uses_messages:
                received = [[row] for row in flat.view(self._members, -1)]
                self._send_and_receive(pending, [[part]] * self._members, received)
                return
            pending.tensors += [flat, part]
            gathered, local = movable(flat), movable(part)
            work = all_gather_single(gathered, local, group=self.group, async_op=True)
            pending.works.append(work)

    def scatter(
        self, terms: Sequence[Tensor], flat: Tensor | None = None
    ) -> tuple[Tensor, PendingExchange]:
        """Begin to sum the `terms` of all ranks; return this rank's part, which fills on arrival.

        `flat` has the terms packed already; None packs them here.
        """
        if flat is None and self._packing is not None:
            flat = pack_tensors(self._packing, [terms[at] for at in self._small], self._dtype)
        like = terms[0] if flat is None else flat
        part, pending = like.new_empty(self.length, dtype=self._dtype), PendingExchange()
        if not self._uses_messages:
            assert flat is not None
            self._sum_by_collective(pending, part, flat)
            return part, pending
        sent = self._member_rows([terms[at].contiguous() for at in self._large])
        for row, packed_part in zip(sent, () if flat is None else flat.view(self._members, -1)):
            row.append(packed_part)
        pending.on_arrival = ScatteredSum(sent, part, self._member, self.group).wait
        return part, pending

    def _member_rows(self, large: Sequence[Tensor]) -> list[list[Tensor]]:
        """View the pieces of large tensors flat, in a list for each member."""
        by_tensor = []
        for tensor, cut in zip(large, [self._tensors[at] for at in self._large]):
            if cut.are_even:
                by_tensor.append([row.view(-1) for row in cut.split_evenly(tensor)])
            else:
                by_tensor.append([tensor.narrow(cut.dim, *b).view(-1) for b in cut.bounds])
        return [list(row) for row in zip(*by_tensor)] or [[] for _ in range(self._members)]

    def _send_and_receive(
        self,
        pending: PendingExchange,
        sent: Sequence[Sequence[Tensor]],
        received: Sequence[Sequence[Tensor]],
    ) -> None:
        pending.works += send_and_receive(sent, received, self._member, self.group)
        pending.tensors += [piece for row in (*sent, *received) for piece in row]

    def _sum_by_collective(self, pending: PendingExchange, part: Tensor, flat: Tensor) -> None:
        terms, local = flat.to(self._carrier), part.to(self._carrier)
        pending.tensors += [terms, local]
        work = reduce_scatter_single(local, terms, group=self.group, async_op=True)
        pending.works.append(work)
        if local is not part:
            pending.on_arrival = lambda: part.copy_(local)
