"""Send activations and gradients between pipeline stages, under torch.distributed.

Sends never wait. A receive is posted one action before the one that needs it: early enough to
overlap, late enough to hold no memory before.

NCCL has no tags, and runs all messages of one communicator in order. So each sender has a group
for each receiver, and receives are posted in the order of the sends. Tags guard this on gloo.

gloo does not report finished sends. A message that a rank sends after reading another proves that
the other one arrived: its memory is freed then, at the same action of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import wait_for
from autopar.pipeline.running.executor import MessageKey, messages_of
from autopar.pipeline.running.worker import Value
from autopar.pipeline.schedule import Schedule
from autopar.runtime.backends.stage_ranks import StageRanks
from autopar.runtime.backends.world import world

Shape = tuple[tuple[int, ...], torch.dtype]


class MessageTimes(Protocol):
    """When messages are sent and read, in positions of the actions of their ranks."""

    @property
    def numbers(self) -> int:
        """Return how many numbers of micro-batches tell messages under way apart."""
        ...

    def sent_at(self, key: MessageKey) -> int:
        """Return the position of the action that sends a message."""

    def read_at(self, key: MessageKey) -> int:
        """Return the position of the action that reads a message."""

    def in_order(self, sender: int, receiver: int) -> Iterator[MessageKey]:
        """Yield the messages from one rank to another."""


class StepMessages:
    """The times of the messages of one step."""

    def __init__(self, schedule: Schedule) -> None:
        self.numbers = schedule.all_parts
        self._orders: dict[tuple[int, int], list[MessageKey]] = {}  # by sender and receiver
        self._sent_at: dict[MessageKey, int] = {}
        self._read_at: dict[MessageKey, int] = {}
        for sender, order in enumerate(schedule.orders):
            for position, action in enumerate(order):
                for key, receiver in messages_of(schedule, action, sent=True):
                    self._sent_at[key] = position
                    if receiver != sender:
                        self._orders.setdefault((sender, receiver), []).append(key)
                for key, _ in messages_of(schedule, action, sent=False):
                    self._read_at[key] = position

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return the senders and receivers of all messages."""
        return [*self._orders]

    def sent_at(self, key: MessageKey) -> int:
        return self._sent_at[key]

    def read_at(self, key: MessageKey) -> int:
        return self._read_at[key]

    def in_order(self, sender: int, receiver: int) -> Iterator[MessageKey]:
        return iter(self._orders[sender, receiver])


class Messages:
    """Sends and receives the messages of one rank."""

    def __init__(
        self,
        ranks: StageRanks,
        shapes: Callable[[MessageKey], Sequence[Shape]],
        device: torch.device,
        times: MessageTimes | None = None,
    ) -> None:
        """`shapes`: a function that returns the shapes and dtypes of a message to this rank.
        `times`: None: those of one step."""
        self.schedule, self.place, self.line = ranks.schedule, ranks.place, ranks.line
        self.shapes, self.device = shapes, device
        step = StepMessages(self.schedule)
        self.times: MessageTimes = times or step
        self._groups: dict[tuple[int, int], Any] = {}  # by sender and receiver
        self._carrier = world().carrier
        for line in ranks.lines:
            for sender, receiver in step.pairs:
                group = world().channel(line[sender], line[receiver])
                if group is not None:
                    self._groups[sender, receiver] = group
        self._senders = [sender for sender, receiver in step.pairs if receiver == self.place]
        self._due: dict[int, Iterator[MessageKey]] = {}  # by sender: messages of later receives
        self._local: dict[MessageKey, list[Value]] = {}  # to another stage of this rank
        self._expected: dict[MessageKey, list[tuple[Tensor, dist.Work | None]]] = {}
        # Sends that may still run, their values, receivers, and positions of reading actions.
        self._sent: list[tuple[dist.Work, Tensor, int, int]] = []

    def start(self) -> None:
        """Begin a step."""
        self._due = {sender: self.times.in_order(sender, self.place) for sender in self._senders}

    def expect(self, key: MessageKey, sender: int) -> None:
        if sender != self.place:
            while key not in self._expected:
                due = next(self._due[sender])
                self._expect_next(due, sender)

    def _expect_next(self, key: MessageKey, sender: int) -> None:
        self._expected[key] = [
            self._begin_receive(key, sender, number, shape, dtype)
            for number, (shape, dtype) in enumerate(self.shapes(key))
        ]

    def receive(self, key: MessageKey, sender: int) -> list[Value]:
        if sender == self.place:
            return self._local.pop(key)
        self.expect(key, sender)
        values = []
        for value, work in self._expected.pop(key):
            if work is not None:
                wait_for(work)
            values.append([value.to(self.device)])
        self._free_sent(sender, self.times.sent_at(key))
        return values

    def _free_sent(self, reader: int, position: int) -> None:
        """Free the values that rank `reader` had read before its action at `position`."""
        remaining = []
        for sent in self._sent:
            work, _, receiver, read_at = sent
            if receiver == reader and read_at <= position:
                wait_for(work)
            elif not work.is_completed():
                remaining.append(sent)
        self._sent = remaining

    def send(self, key: MessageKey, receiver: int, values: list[Value]) -> None:
        if receiver == self.place:
            self._local[key] = values
            return
        for number, (value,) in enumerate(values):
            if value.numel():
                value = value.contiguous().to(self._carrier)
                group = self._groups[self.place, receiver]
                work = dist.isend(value, self.line[receiver], group, self._tag(key, number))
                assert work is not None
                self._sent.append((work, value, receiver, self.times.read_at(key)))

    def arrived(self, key: MessageKey) -> bool:
        """Return True: a process of one rank waits in `receive`."""
        return True

    def finish(self) -> None:
        """Wait until all sends are done."""
        for work, *_ in self._sent:
            wait_for(work)
        self._sent.clear()

    def _begin_receive(
        self, key: MessageKey, sender: int, number: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, dist.Work | None]:
        value = torch.empty(shape, dtype=dtype, device=self._carrier)
        if not value.numel():
            return value, None
        group = self._groups[sender, self.place]
        return value, dist.irecv(value, self.line[sender], group, self._tag(key, number))

    def _tag(self, key: MessageKey, number: int) -> int:
        schedule = self.schedule
        tag = (number * 2 + key.forward) * schedule.pipes + key.pipe
        numbers = self.times.numbers
        return (tag * schedule.stages + key.stage) * numbers + key.microbatch % numbers
