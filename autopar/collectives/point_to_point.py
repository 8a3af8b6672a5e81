"""Messages: pieces that the members of a group send one another straight.

gloo stages copies of what it gathers, sums by an all-reduce, and lets go of tensors when its own
threads come to it. So what lies on a host travels by messages, which take no more memory than they
move, and half the traffic of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import PendingWork, is_gloo, receive_from, send_to, wait_for
from autopar._torch.tensors import add_each, copy_each


def uses_messages(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether pieces that lie on a device are sent straight."""
    return device.type == "cpu" and is_gloo(group, "cpu")


def send_and_receive(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    own: int,
    group: dist.ProcessGroup,
) -> list[PendingWork]:
    """With each other member, by its place in the group, the neighbours first.

    What is sent before its receiver waits for it is written by gloo's thread, beside what this one
    does; else by this thread, and that one spins meanwhile. Who waits holds the tensors.
    """
    works: list[PendingWork] = []
    steps = range(1, len(sent))
    for target in [(own + step) % len(sent) for step in steps]:
        works += [send_to(one, target, group) for one in sent[target] if one.numel()]
    for source in [(own - step) % len(sent) for step in steps]:
        works += [receive_from(one, source, group) for one in received[source] if one.numel()]
    return works


def exchange_pieces(
    sent: Sequence[Tensor], received: Sequence[Tensor], own: int, group: dist.ProcessGroup
) -> None:
    """Send each member its piece, and wait for theirs; one's own is copied."""
    works = send_and_receive([[one] for one in sent], [[one] for one in received], own, group)
    received[own].copy_(sent[own])
    for work in works:
        wait_for(work)


class ScatteredSum:
    """Of the sum of all members' terms one's own part, which is there after `wait`."""

    def __init__(
        self,
        terms: Sequence[Sequence[Tensor]],
        part: Tensor,
        own: int,
        group: dist.ProcessGroup,
    ) -> None:
        """`terms`: what this member adds to the part of each, which lies one after another in
        `part`."""
        self._part, self._own = part, terms[own]
        self._lengths = [one.numel() for one in self._own]
        # The first that arrives lies in `part` itself, and all others are added to it.
        more = [torch.empty_like(part) for _ in range(len(terms) - 2)]
        self._arriving = [part, *more] if len(terms) > 1 else []
        received = [self._split(one) for one in self._arriving]
        received.insert(own, [])
        self._works = send_and_receive(terms, received, own, group)
        self._terms: Sequence[Sequence[Tensor]] | None = terms  # as long as they are being sent

    def wait(self) -> None:
        """Finish `part`; once it is there, this does nothing."""
        if self._terms is None:
            return
        for work in self._works:
            wait_for(work)
        put = add_each if self._arriving else copy_each
        put(self._split(self._part), [one.reshape(-1) for one in self._own])
        for one in self._arriving[1:]:
            self._part.add_(one)
        self._works, self._terms, self._arriving, self._own = [], None, [], ()

    def _split(self, part: Tensor) -> list[Tensor]:
        return list(part.view(-1).split_with_sizes(self._lengths))
