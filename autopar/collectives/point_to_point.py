"""Messages: pieces that the members of a group send one another directly.

gloo stages copies of what it gathers, sums by an all-reduce, and frees tensors when its own threads
come to it. So tensors on a host travel by messages, which take no more memory than they move, and
half the traffic of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import PendingWork, is_gloo, receive_from, send_to, wait_for
from autopar._torch.tensors import add_each, copy_each


def uses_messages(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether pieces on a device are sent directly."""
    return device.type == "cpu" and is_gloo(group, "cpu")


def send_and_receive(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    rank: int,
    group: dist.ProcessGroup,
) -> list[PendingWork]:
    """Start to exchange tensors with each other member, by its place in the group, neighbours
    first.

    A message that is sent before its receiver waits is written by gloo's thread, while this thread
    goes on. Otherwise this thread writes it, and the other one spins. The caller holds the tensors.
    """
    works: list[PendingWork] = []
    steps = range(1, len(sent))
    for target in [(rank + step) % len(sent) for step in steps]:
        works += [send_to(tensor, target, group) for tensor in sent[target] if tensor.numel()]
    for source in [(rank - step) % len(sent) for step in steps]:
        works += [
            receive_from(tensor, source, group) for tensor in received[source] if tensor.numel()
        ]
    return works


def exchange_pieces(
    sent: Sequence[Tensor], received: Sequence[Tensor], rank: int, group: dist.ProcessGroup
) -> None:
    """Send each member its piece, and wait for theirs; this member's own is copied."""
    works = send_and_receive(
        [[piece] for piece in sent], [[piece] for piece in received], rank, group
    )
    received[rank].copy_(sent[rank])
    for work in works:
        wait_for(work)


class ScatteredSum:
    """A sum over all members of which this one keeps its part, complete after `wait`."""

    def __init__(
        self, terms: Sequence[Sequence[Tensor]], part: Tensor, rank: int, group: dist.ProcessGroup
    ) -> None:
        """Start the sum; `terms`: what this member adds to each member's `part`."""
        self._part, self._own = part, terms[rank]
        self._lengths = [tensor.numel() for tensor in self._own]
        # The first that arrives lies in `part` itself, and all others are added to it.
        more = [torch.empty_like(part) for _ in range(len(terms) - 2)]
        self._arriving = [part, *more] if len(terms) > 1 else []
        received = [self._split(tensor) for tensor in self._arriving]
        received.insert(rank, [])
        self._works = send_and_receive(terms, received, rank, group)
        self._terms: Sequence[Sequence[Tensor]] | None = terms  # as long as they are being sent

    def wait(self) -> None:
        """Complete `part`; a second call does nothing."""
        if self._terms is None:
            return
        for work in self._works:
            wait_for(work)
        put = add_each if self._arriving else copy_each
        put(self._split(self._part), [piece.reshape(-1) for piece in self._own])
        for piece in self._arriving[1:]:
            self._part.add_(piece)
        self._works, self._terms, self._arriving, self._own = [], None, [], ()

    def _split(self, part: Tensor) -> list[Tensor]:
        return list(part.view(-1).split_with_sizes(self._lengths))
