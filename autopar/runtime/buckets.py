"""Buckets: gradients that are partial sums, summed over their axes while backward goes on.

A bucket is one flat buffer for parameters of one dtype and one set of axes, filled from the last
parameter to the first, as backward makes them. A full bucket is summed at once, asynchronously;
its gradients are views of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.groups import Axes, Groups

BUCKET_BYTES = 25 * 2**20  # as large as hides latency; the first gradients wait for no more
FIRST_BUCKET_BYTES = 2**20


@dataclass
class Slot:
    """One parameter in a bucket: its local tensor, which autograd fills, and its place."""

    name: str
    leaf: Tensor
    start: int = 0


@dataclass
class Bucket:
    """Parameters whose gradients are summed in one collective."""

    axes: Axes
    slots: list[Slot] = field(default_factory=list)
    buffer: Tensor | None = None
    waiting: int = 0
    work: dist.Work | None = None

    @property
    def numel(self) -> int:
        return sum(slot.leaf.numel() for slot in self.slots)

    def view(self, slot: Slot) -> Tensor:
        assert self.buffer is not None
        return self.buffer.narrow(0, slot.start, slot.leaf.numel()).view(slot.leaf.shape)


def make_buckets(parameters: Sequence[tuple[str, Tensor, Axes]]) -> list[Bucket]:
    """Buckets for `(name, local tensor, axes)`, in the order in which backward fills them."""
    filling: dict[tuple[Axes, torch.dtype], Bucket] = {}
    buckets: list[Bucket] = []
    for name, leaf, axes in reversed(parameters):
        key = (axes, leaf.dtype)
        bucket = filling.get(key)
        limit = FIRST_BUCKET_BYTES if not buckets or buckets == [bucket] else BUCKET_BYTES
        if bucket is None or (bucket.numel + leaf.numel()) * leaf.itemsize > limit:
            bucket = filling[key] = Bucket(axes)
            buckets.append(bucket)
        bucket.slots.append(Slot(name, leaf, bucket.numel))
    return buckets


class GradientSync:
    """Sums the gradients of one backward pass, bucket by bucket, as they become ready."""

    def __init__(self, buckets: Iterable[Bucket], groups: Groups) -> None:
        self.buckets, self.groups = list(buckets), groups
        self.active = True
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.leaf.register_post_accumulate_grad_hook(self._filler(bucket, slot))

    def start(self, in_use: frozenset[str]) -> None:
        """Before a backward pass. Buffers behind gradients `in_use` are left to their owner."""
        for bucket in self.buckets:
            bucket.waiting, bucket.work = len(bucket.slots), None
            first = bucket.slots[0].leaf
            if bucket.buffer is None or any(slot.name in in_use for slot in bucket.slots):
                bucket.buffer = first.new_empty(bucket.numel)

    def finish(self) -> dict[str, Tensor]:
        """Wait for all sums: the gradient of each parameter that got one on some rank."""
        grads = {}
        for bucket in self.buckets:
            if bucket.waiting:
                if bucket.waiting == len(bucket.slots):
                    continue
                # Parameters that this pass did not reach have a gradient of zero here.
                for slot in bucket.slots:
                    if slot.leaf.grad is None:
                        bucket.view(slot).zero_()
                self._sum(bucket)
            assert bucket.work is not None
            bucket.work.wait()
            for slot in bucket.slots:
                grads[slot.name] = bucket.view(slot)
        return grads

    def _filler(self, bucket: Bucket, slot: Slot):  # type: ignore[no-untyped-def]
        def fill(leaf: Tensor) -> None:
            if not self.active:
                return
            assert leaf.grad is not None
            bucket.view(slot).copy_(leaf.grad)
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._sum(bucket)

        return fill

    def _sum(self, bucket: Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.buffer, group=self.groups[bucket.axes], async_op=True)
