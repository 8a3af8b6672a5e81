"""Messages: what pipeline stages send one another, under torch.distributed.

Sends are asynchronous and never wait. A receive is posted when its rank begins the action before
the one that needs it, early enough to travel beside that action and late enough to hold no memory
before. Tags tell messages apart by direction, pipe, receiving stage, micro-batch and value, so that
any order of sends meets any order of receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.pipeline.executor import Key
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.worker import Value
from autopar.runtime.groups import new_group

Shape = tuple[tuple[int, ...], torch.dtype]


class Messages:
    """The post of one rank: `ranks[c]` is the global rank at place c of the pipeline."""

    def __init__(
        self,
        schedule: Schedule,
        ranks: Sequence[int],
        shapes: Callable[[Key], Sequence[Shape]],
        device: torch.device,
    ) -> None:
        """`shapes` of the values of a message to this rank."""
        self.schedule, self.ranks, self.shapes, self.device = schedule, ranks, shapes, device
        self._group = new_group(backend="nccl" if device.type == "cuda" else "gloo")
        self._here = dist.get_rank()
        self._own: dict[Key, list[Value]] = {}  # to another stage of this rank
        self._expected: dict[Key, list[tuple[Tensor, dist.Work | None]]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def expect(self, key: Key, sender: int) -> None:
        if self.ranks[sender] == self._here or key in self._expected:
            return
        self._expected[key] = []
        for number, (shape, dtype) in enumerate(self.shapes(key)):
            value = torch.empty(shape, dtype=dtype, device=self.device)
            work = None
            if value.numel():
                source, tag = self.ranks[sender], self._tag(key, number)
                work = dist.irecv(value, source, group=self._group, tag=tag)
            self._expected[key].append((value, work))

    def receive(self, key: Key, sender: int) -> list[Value]:
        if self.ranks[sender] == self._here:
            return self._own.pop(key)
        self.expect(key, sender)
        values = []
        for value, work in self._expected.pop(key):
            if work is not None:
                work.wait()
            values.append([value])
        return values

    def send(self, key: Key, receiver: int, values: list[Value]) -> None:
        if self.ranks[receiver] == self._here:
            self._own[key] = values
            return
        for number, (value,) in enumerate(values):
            if value.numel():
                value = value.contiguous()
                target, tag = self.ranks[receiver], self._tag(key, number)
                work = dist.isend(value, target, group=self._group, tag=tag)
                assert work is not None
                self._sent.append((work, value))
        self._sent = [pair for pair in self._sent if not pair[0].is_completed()]

    def arrived(self, key: Key) -> bool:
        """A process of one rank waits in `receive`."""
        return True

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _tag(self, key: Key, number: int) -> int:
        made = self.schedule
        tag = (number * 2 + key.forward) * made.pipes + key.pipe
        return (tag * made.stages + key.stage) * made.slices + key.slice_
