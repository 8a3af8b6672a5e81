"""Buckets: gradients that are partial sums, summed over their axes while backward goes on.

A bucket holds parameters of one dtype and one set of axes, from the last parameter to the first, as
backward makes their gradients. When it has them all, they are copied to one flat buffer that is
summed at once, asynchronously, and the gradients are views of it: it lives as long as they do. A
gradient that is large enough to be worth its own collective is summed where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import joined_flat, placed_like, split_like, wait_for
from autopar.collectives.eager import LateSum
from autopar.cost.price import BUCKET_BYTES
from autopar.runtime.groups import Axes, Groups
from autopar.runtime.placing import in_own_memory

FIRST_BUCKET_BYTES = 4 * 2**20  # the first gradients wait for no more
ALONE_BYTES = 2 * 2**20  # from here on, a copy costs more than a collective of its own


@dataclass
class Slot:
    """One parameter in a bucket: its local tensor, which autograd fills."""

    name: str
    leaf: Tensor
    parameter: Tensor  # the DTensor that it is a piece of
    size: int  # bytes of the largest piece: all ranks form the same buckets, whatever is theirs


@dataclass
class Bucket:
    """Parameters whose gradients are summed in one collective."""

    axes: Axes
    slots: list[Slot] = field(default_factory=list)
    buffer: Tensor | None = None  # flat, what is summed: all gradients, then the riders
    riders: list[Tensor] = field(default_factory=list)  # numbers that are summed along
    waiting: int = 0
    work: dist.Work | None = None

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)

    @property
    def alone(self) -> bool:
        return len(self.slots) == 1 and self.size >= ALONE_BYTES

    def gather(self) -> Tensor:
        """All gradients in one tensor, ready to be summed; those that nobody made are zero."""
        grads = [*taken([slot.leaf for slot in self.slots]), *self.riders]
        # What is one tensor is not copied.
        self.buffer = joined_flat(grads if len(grads) > 1 else in_own_memory(grads))
        return self.buffer

    def give(self) -> dict[str, DTensor]:
        """The gradients after their sum, and the riders theirs; nothing is kept."""
        assert self.buffer is not None
        pieces = split_like(self.buffer, [*(slot.leaf for slot in self.slots), *self.riders])
        for rider, total in zip(self.riders, pieces[len(self.slots) :]):
            rider.copy_(total)
        self.work, self.buffer, self.riders = None, None, []
        return placed(self.slots, pieces[: len(self.slots)])


def make_buckets(slots: Sequence[tuple[Slot, Axes]]) -> list[Bucket]:
    """Buckets for parameters and the axes of their sums, in the order in which backward fills."""
    filling: dict[tuple[Axes, torch.dtype], Bucket] = {}
    buckets: list[Bucket] = []
    for slot, axes in reversed(slots):
        key, alone = (axes, slot.leaf.dtype), slot.size >= ALONE_BYTES
        bucket = None if alone else filling.get(key)
        limit = FIRST_BUCKET_BYTES if not buckets or buckets == [bucket] else BUCKET_BYTES
        if bucket is None or bucket.size + slot.size > limit:
            bucket = Bucket(axes)
            buckets.append(bucket)
            if not alone:
                filling[key] = bucket
        bucket.slots.append(slot)
    return buckets


def taken(leaves: Iterable[Tensor]) -> list[Tensor]:
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
    """Sums the gradients of one backward pass, bucket by bucket, as they become ready."""

    def __init__(self, buckets: Iterable[Bucket], groups: Groups) -> None:
        self.buckets, self.groups = list(buckets), groups
        self.active = False  # between start and finish
        # The last bucket is full when backward ends: `finish` sums it, and nobody needs to count.
        self._hooks = [
            slot.leaf.register_post_accumulate_grad_hook(self._arrival(bucket))
            for bucket in self.buckets[:-1]
            for slot in bucket.slots
        ]

    def close(self) -> None:
        """Others sum these gradients from now on."""
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """A backward pass begins."""
        self.active = True
        for bucket in self.buckets:
            bucket.waiting, bucket.work, bucket.buffer = len(bucket.slots), None, None

    def finish(self, reached: Set[str]) -> dict[str, DTensor]:
        """Wait for all sums: the gradients of `reached`, the same parameters on every rank."""
        self.active = False
        for bucket in self.buckets:
            is_needed = any(slot.name in reached for slot in bucket.slots)
            if bucket.work is None and (is_needed or bucket.riders):
                self._sum(bucket)
        grads: dict[str, DTensor] = {}
        for bucket in self.buckets:
            if bucket.work is not None:
                wait_for(bucket.work)
                grads |= bucket.give()
        return {name: grad for name, grad in grads.items() if name in reached}

    def takes_along(self, late: LateSum) -> bool:
        """Whether a bucket of the coming pass sums a number of the program as well."""
        for bucket in self.buckets:
            if (
                not bucket.alone
                and late.tensor.dtype == bucket.slots[0].leaf.dtype
                and late.group == self.groups.name(bucket.axes)
            ):
                bucket.riders.append(late.tensor)
                return True
        return False

    def _arrival(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def arrive(leaf: Tensor) -> None:
            if self.active:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._sum(bucket)

        return arrive

    def _sum(self, bucket: Bucket) -> None:
        with torch.no_grad():
            gathered = bucket.gather()
        group = self.groups[bucket.axes]
        bucket.work = dist.all_reduce(gathered, group=group, async_op=True)
