"""Buckets: gradients that are partial sums, summed over their ranks while the step goes on.

A parameter belongs to the stages that read it (a tied one to several), and lies on every rank that
holds one of these in any pipe. Its gradient is complete when the last backward there of those
stages makes it: then the sum with all other such ranks, and with the copies inside the stage, goes
on beside what is left of that backward and of the schedule.

A bucket holds parameters of one dtype and one set of ranks, from the last parameter to the first,
as backward makes their gradients. When it has them all, they are copied to one flat buffer that is
summed at once, asynchronously, and the gradients are views of it: it lives as long as they do. A
gradient that is large enough to be worth its own collective is summed where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import joined_flat, placed_like, split_like, wait_for
from autopar.collectives.eager import LateSum
from autopar.cost.price import BUCKET_BYTES
from autopar.runtime.placing import in_own_memory

FIRST_BUCKET_BYTES = 4 * 2**20  # the first gradients wait for no more
NEVER = -2  # no place in an order of actions
ALONE_BYTES = 2 * 2**20  # from here on, a copy costs more than a collective of its own


@dataclass
class Slot:
    """One parameter in a bucket: its local tensor, which autograd fills."""

    name: str
    leaf: Tensor
    parameter: Tensor  # the DTensor that it is a piece of
    size: int  # bytes of the largest piece: all ranks form the same buckets, whatever is theirs


@dataclass(frozen=True)
class Summed:
    """What parameters have in common that are summed over the same ranks."""

    group: dist.ProcessGroup
    ready: int  # the action of the step after which their gradients are complete; -1: before all
    in_backward: bool  # that is one backward pass, which makes each gradient once


@dataclass
class Bucket:
    """Parameters whose gradients are summed in one collective."""

    key: Hashable
    slots: list[Slot] = field(default_factory=list)
    buffer: Tensor | None = None  # flat, what is summed: all gradients, then the riders
    riders: list[Tensor] = field(default_factory=list)  # numbers that are summed along
    waiting: int = 0
    work: dist.Work | None = None

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(slot.name for slot in self.slots)

    @property
    def alone(self) -> bool:
        return len(self.slots) == 1 and self.size >= ALONE_BYTES

    def gather(self) -> Tensor:
        """All gradients in one tensor, ready to be summed; those that nobody made are zero."""
        grads = take_gradients([slot.leaf for slot in self.slots]) + self.riders
        # What is one tensor is not copied.
        self.buffer = joined_flat(grads if len(grads) > 1 else in_own_memory(grads))
        return self.buffer

    def give(self) -> dict[str, DTensor]:
        """The gradients after their sum, and the riders theirs; nothing is kept."""
        assert self.buffer is not None
        pieces = split_like(self.buffer, [slot.leaf for slot in self.slots] + self.riders)
        for rider, total in zip(self.riders, pieces[len(self.slots) :]):
            rider.copy_(total)
        self.work, self.buffer, self.riders = None, None, []
        return placed(self.slots, pieces[: len(self.slots)])


def make_buckets(slots: Sequence[tuple[Slot, Hashable]]) -> list[Bucket]:
    """Buckets for parameters and what tells their sums apart, in the order that backward fills."""
    filling: dict[Hashable, Bucket] = {}
    first: dict[Hashable, Bucket | None] = {}
    buckets: list[Bucket] = []
    for slot, key in reversed(slots):
        kind, alone = (key, slot.leaf.dtype), slot.size >= ALONE_BYTES
        bucket = None if alone else filling.get(kind)
        limit = FIRST_BUCKET_BYTES if first.get(key) is bucket else BUCKET_BYTES
        if bucket is None or bucket.size + slot.size > limit:
            bucket = Bucket(key)
            buckets.append(bucket)
            first.setdefault(key, bucket)
            if not alone:
                filling[kind] = bucket
        bucket.slots.append(slot)
    return buckets


def take_gradients(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Gradients off the leaves of parameters that get one; zero where this rank made none."""
    gradients = []
    for leaf in leaves:
        gradient, leaf.grad = leaf.grad, None
        gradients.append(leaf.detach().new_zeros(leaf.shape) if gradient is None else gradient)
    return gradients


def placed(slots: Sequence[Slot], gradients: Iterable[Tensor]) -> dict[str, DTensor]:
    """By name, this rank's pieces of gradients as DTensors."""
    parameters = [slot.parameter for slot in slots]
    return {s.name: grad for s, grad in zip(slots, placed_like(parameters, gradients))}


class GradientSync:
    """Sums the gradients of a step, or of one backward pass, bucket by bucket."""

    def __init__(self, slots: Sequence[tuple[Slot, Hashable]], sums: Mapping[Any, Summed]) -> None:
        """`slots`: all that learn here, with a key of `sums`; without, no other rank has a part."""
        self.slots, self._sums = [slot for slot, _ in slots], sums
        self.buckets = make_buckets([(slot, key) for slot, key in slots if key in sums])
        self._alone = [slot for slot, key in slots if key not in sums]
        self._due: dict[Hashable, list[Bucket]] = {}  # of each key, those that are not yet summed
        self._now = NEVER
        self._complete: dict[int, list[Hashable]] = {}
        for key, one in sums.items():
            self._complete.setdefault(one.ready, []).append(key)
        # The last bucket is full when backward ends: it is summed then, and nobody needs to count.
        self._hooks = [
            slot.leaf.register_post_accumulate_grad_hook(self._arrival(bucket))
            for bucket in self.buckets[:-1]
            if sums[bucket.key].in_backward
            for slot in bucket.slots
        ]

    def close(self) -> None:
        """Others sum these gradients from now on."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget what a pass that broke off has left."""
        for slot in self.slots:
            slot.leaf.grad = None
        for bucket in self.buckets:
            bucket.riders, bucket.buffer, bucket.work = [], None, None

    def start(self, reached: Set[str]) -> None:
        """A step, or a backward pass, begins; it reaches these parameters, or some of them."""
        self._due.clear()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.names & reached)
            if bucket.waiting:
                self._due.setdefault(bucket.key, []).append(bucket)

    def after(self, position: int) -> None:
        """The action of a step at `position` is done: sum what is complete. The next one begins."""
        self._now = position + 1
        for key in self._complete.get(position, ()):
            for bucket in self._due.pop(key, ()):
                self._sum(bucket)

    def finish(self, reached: Set[str]) -> dict[str, DTensor]:
        """Wait for all sums: the gradients of `reached`, the same parameters on every rank."""
        self._now = NEVER
        for bucket in self.buckets:
            is_needed = bucket.riders or not bucket.names.isdisjoint(reached)
            if bucket.work is None and is_needed:
                self._sum(bucket)
        grads: dict[str, DTensor] = {}
        for bucket in self.buckets:
            if bucket.work is not None:
                wait_for(bucket.work)
                grads |= bucket.give()
        alone = [slot for slot in self._alone if slot.name in reached]
        grads |= placed(alone, in_own_memory(take_gradients([slot.leaf for slot in alone])))
        return {name: grad for name, grad in grads.items() if name in reached}

    def takes_along(self, late: LateSum) -> bool:
        """Whether a bucket of the coming pass sums a number of the program as well."""
        for bucket in self.buckets:
            if (
                not bucket.alone
                and late.tensor.dtype == bucket.slots[0].leaf.dtype
                and late.group == self._sums[bucket.key].group.group_name
            ):
                bucket.riders.append(late.tensor)
                return True
        return False

    def _arrival(self, bucket: Bucket) -> Callable[[Tensor], None]:
        ready = self._sums[bucket.key].ready

        def arrive(leaf: Tensor) -> None:
            if self._now == ready:
                bucket.waiting -= 1
                due = self._due.get(bucket.key)
                # In one order on all ranks, whatever fills first on each.
                while due and due[0].waiting == 0:
                    self._sum(due.pop(0))

        return arrive

    def _sum(self, bucket: Bucket) -> None:
        with torch.no_grad():
            gathered = bucket.gather()
        group = self._sums[bucket.key].group
        bucket.work = dist.all_reduce(gathered, group=group, async_op=True)
