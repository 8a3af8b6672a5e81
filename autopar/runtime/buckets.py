"""Buckets: gradients that are partial sums, summed over their axes while backward goes on.

A bucket holds parameters of one dtype and one set of axes, from the last parameter to the first, as
backward makes their gradients. When it has them all, they are copied to one flat buffer that is
summed at once, asynchronously, and the gradients are views of it. A gradient that is large enough
to be worth its own collective is summed where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import placed_like
from autopar.collectives.eager import LateSum
from autopar.cost.price import BUCKET_BYTES
from autopar.runtime.groups import Axes, Groups

FIRST_BUCKET_BYTES = 4 * 2**20  # the first gradients wait for no more
ALONE_BYTES = 2 * 2**20  # from here on, a copy costs more than a collective of its own


@dataclass
class Slot:
    """One parameter in a bucket: its local tensor, which autograd fills."""

    name: str
    leaf: Tensor
    parameter: Tensor  # the DTensor that it is a piece of


@dataclass
class Bucket:
    """Parameters whose gradients are summed in one collective."""

    axes: Axes
    slots: list[Slot] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)  # the gradients, in the buffer
    placed: list[DTensor] = field(default_factory=list)  # these, as gradients of the parameters
    buffer: Tensor | None = None  # with one element more, for the rider
    rider: Tensor | None = None  # a number that is summed along
    waiting: int = 0
    work: dist.Work | None = None

    @property
    def numel(self) -> int:
        return sum(slot.leaf.numel() for slot in self.slots)

    @property
    def alone(self) -> bool:
        leaf = self.slots[0].leaf
        return len(self.slots) == 1 and leaf.numel() * leaf.itemsize >= ALONE_BYTES

    def allocate(self) -> None:
        """New memory for the gradients."""
        self.buffer = self.slots[0].leaf.detach().new_zeros(self.numel + 1)
        pieces = self.buffer.split([*(slot.leaf.numel() for slot in self.slots), 1])
        self._give([piece.view(slot.leaf.shape) for piece, slot in zip(pieces, self.slots)])

    def _give(self, views: list[Tensor]) -> None:
        self.views = views
        self.placed = [placed_like(slot.parameter, view) for slot, view in zip(self.slots, views)]

    def gather(self) -> Tensor:
        """All gradients in one tensor, ready to be summed; those that nobody made are zero."""
        grads = [slot.leaf.grad for slot in self.slots]
        if self.alone and grads[0] is not None:
            self._give([grads[0].contiguous()])
            return self.views[0]
        assert self.buffer is not None
        made = [(view, grad) for view, grad in zip(self.views, grads) if grad is not None]
        if len(made) < len(self.slots):
            self.buffer.zero_()
        if made:
            torch._foreach_copy_([view for view, _ in made], [grad for _, grad in made])
        if self.rider is not None:
            self.buffer[-1] = self.rider
        return self.buffer


def make_buckets(slots: Sequence[tuple[Slot, Axes]]) -> list[Bucket]:
    """Buckets for parameters and the axes of their sums, in the order in which backward fills."""
    filling: dict[tuple[Axes, torch.dtype], Bucket] = {}
    buckets: list[Bucket] = []
    for slot, axes in reversed(slots):
        leaf = slot.leaf
        key, alone = (axes, leaf.dtype), leaf.numel() * leaf.itemsize >= ALONE_BYTES
        bucket = None if alone else filling.get(key)
        limit = FIRST_BUCKET_BYTES if not buckets or buckets == [bucket] else BUCKET_BYTES
        if bucket is None or (bucket.numel + leaf.numel()) * leaf.itemsize > limit:
            bucket = Bucket(axes)
            buckets.append(bucket)
            if not alone:
                filling[key] = bucket
        bucket.slots.append(slot)
    return buckets


class GradientSync:
    """Sums the gradients of one backward pass, bucket by bucket, as they become ready."""

    def __init__(self, buckets: Iterable[Bucket], groups: Groups) -> None:
        self.buckets, self.groups = list(buckets), groups
        self.active = False  # between start and finish
        # The last bucket is full when backward ends: `finish` sums it, and nobody needs to count.
        for bucket in self.buckets[:-1]:
            for slot in bucket.slots:
                slot.leaf.register_post_accumulate_grad_hook(self._arrival(bucket))

    def start(self) -> None:
        """A backward pass begins. Buffers behind gradients still in use are left to their owner."""
        self.active = True
        for bucket in self.buckets:
            bucket.waiting, bucket.work = len(bucket.slots), None
            if not bucket.alone and (
                bucket.buffer is None
                or any(slot.parameter.grad is not None for slot in bucket.slots)
            ):
                bucket.allocate()

    def finish(self) -> dict[str, DTensor]:
        """Wait for all sums: the gradient of each parameter that got one on some rank."""
        self.active = False
        grads: dict[str, DTensor] = {}
        touched = [any(s.leaf.grad is not None for s in bucket.slots) for bucket in self.buckets]
        for bucket, has_gradients in zip(self.buckets, touched):
            if bucket.waiting and (has_gradients or bucket.rider is not None):
                self._sum(bucket)
        for bucket, has_gradients in zip(self.buckets, touched):
            if bucket.work is None:
                continue
            bucket.work.wait()
            if bucket.rider is not None and bucket.buffer is not None:
                bucket.rider.copy_(bucket.buffer[-1])
                bucket.rider = None
            if has_gradients:
                grads |= {slot.name: grad for slot, grad in zip(bucket.slots, bucket.placed)}
            if bucket.alone:
                bucket.views, bucket.placed = [], []
        return grads

    def takes_along(self, late: LateSum) -> bool:
        """Whether a bucket of the coming pass sums a number of the program as well."""
        for bucket in self.buckets:
            if (
                not bucket.alone
                and late.tensor.dtype == bucket.slots[0].leaf.dtype
                and late.group == self.groups.name(bucket.axes)
            ):
                bucket.rider = late.tensor
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
