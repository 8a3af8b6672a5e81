"""Buckets: gradients that are partial sums, summed over their ranks while the step goes on.

A parameter belongs to the stages that read it (a tied one to several), and lies on every rank that
holds one of these in any pipe. Its gradient is complete when the last backward there of those
stages makes it: then the sum with all other such ranks, and with the copies inside the stage, goes
on beside what is left of that backward and of the schedule. Where gradients are kept in pieces,
each backward of a micro-batch is summed and cut (reduce-scatter), and pieces add up; where only
optimizer states are, that is done once, to what has added up whole.

Where gradients add up in another dtype than backward makes them in, each backward's are added to
the flat buffer of their bucket, which has that dtype, also where nothing is summed over ranks yet.

A bucket holds parameters of one dtype and one set of ranks, from the last parameter to the first,
as backward makes their gradients. When it has them all, they are copied to one flat buffer that is
summed at once, asynchronously, and the gradients are views of it: it lives as long as they do. A
gradient that is large enough to be worth its own collective is summed where it lies.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.communication import PendingWork, wait_for
from autopar._torch.tensors import add_each, copy_each, dtensors_like, joined_flat, split_like
from autopar.collectives.eager_movements import DeferredSum
from autopar.cost.bucket_prices import SINGLE_BUCKET_BYTES, fill_buckets
from autopar.runtime.backends.host_copies import Copied, HostLink
from autopar.runtime.parameters.flat_buffers import TensorPieces
from autopar.runtime.parameters.piece_exchange import PieceExchange
from autopar.runtime.parameters.placing import ensure_own_memory
from autopar.states import BUFFER_BYTES

NEVER = -2  # no place in an order of actions
NO_CUTS: Mapping[Hashable, int] = MappingProxyType({})

Collectives = Generator[
    PendingWork, None, None
]  # the collectives of a bucket, each when the last is done


@dataclass
class BucketEntry:
    """One parameter in a bucket: what its program reads of it, which autograd fills."""

    name: str
    leaf: Tensor
    parameter: Tensor  # the DTensor that it is a piece or a copy of
    size: int  # bytes of the largest piece: all ranks form the same buckets, whatever is theirs
    # How the gradient is cut after each backward, and at the end of a step.
    each: TensorPieces | None = None
    last: TensorPieces | None = None
    reduce: torch.dtype | None = None  # in which it adds up; None: that of the leaf


@dataclass(frozen=True)
class ReductionSpec:
    """What parameters have in common that are summed over the same ranks."""

    group: dist.ProcessGroup | None  # that sums what is not cut on the way
    each: dist.ProcessGroup | None  # that sums and cuts after each backward
    last: dist.ProcessGroup | None  # that sums and cuts at the end
    # The actions of the step after which gradients are complete as far as they go; and whether
    # that is one backward pass, which makes each gradient once.
    ends: Mapping[int, bool]
    adds: bool = False  # those of each backward are added to the buffer before they are summed
    link: HostLink | None = None  # to the host, where the sums belong

    @property
    def ready(self) -> int:
        """The action after which all is there; -1: before all."""
        return max(self.ends, default=-1)

    @property
    def is_cut(self) -> bool:
        return self.each is not None or self.last is not None

    @property
    def may_wait(self) -> bool:
        """Whether gradients may add up on each rank alone, in the leaf, and be summed later."""
        return self.each is None and not self.adds and self.link is None

    @cached_property
    def drains(self) -> dict[int, bool]:
        """The actions after which there is something to sum."""
        drains = self.ends if self.each is not None or self.adds else {self.ready: True}
        return {at: at >= 0 and self.ends[at] for at in drains}


@dataclass(eq=False)
class GradientBucket:
    """Parameters whose gradients are summed together."""

    key: Hashable
    slots: list[BucketEntry] = field(default_factory=list)
    is_cut: bool = False
    buffer: Tensor | None = None  # flat, what is summed: all gradients, then the riders
    riders: list[Tensor] = field(default_factory=list)  # numbers that are summed along
    waiting: int = 0
    is_complete: bool = False  # its last sum has begun
    sums: Collectives | None = None  # that are under way
    is_cutting: bool = False  # of them, that of one backward
    work: PendingWork | None = None  # of them, the one to wait for
    copied: Copied | None = None  # to the host
    _each: PieceExchange | None = None
    _last: PieceExchange | None = None

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(slot.name for slot in self.slots)

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients add up."""
        return self.slots[0].reduce or self.slots[0].leaf.dtype

    @property
    def alone(self) -> bool:
        return not self.is_cut and len(self.slots) == 1 and self.size >= SINGLE_BUCKET_BYTES

    def sum(self, summed: ReductionSpec, is_last: bool) -> Collectives:
        """Sum what backward has made since the last time; in the end over all ranks."""
        gradients = take_gradients([slot.leaf for slot in self.slots])
        self._prepare(summed)
        if self._each is not None:
            part, work = self._each.scatter(gradients)
            gradients.clear()
            yield from self._cut(work)
            self.buffer = part if self.buffer is None else self.buffer.add_(part)
            del part, work
            if not is_last:
                return
            gradients = self._each.own(self.buffer)
        elif summed.adds:
            self._add(gradients)
            gradients.clear()
            if not is_last:
                return
        if self._last is not None:
            flat = self.buffer if summed.adds else None
            self.buffer, work = self._last.scatter(gradients, flat)
            del flat
            gradients.clear()
            yield from self._cut(work)
        if not (summed.is_cut or summed.adds):
            self.buffer = joined_flat(gradients + self.riders)  # what is one tensor is not copied
        gradients.clear()
        if summed.group is not None:
            assert self.buffer is not None
            yield dist.all_reduce(self.buffer, group=summed.group, async_op=True)
        if summed.link is not None:
            assert self.buffer is not None
            self.buffer, self.copied = summed.link.down(self.buffer)

    def _cut(self, work: PendingWork) -> Collectives:
        self.is_cutting = True
        yield work
        self.is_cutting = False

    def _prepare(self, summed: ReductionSpec) -> None:
        """Know how gradients are cut."""
        device, is_cast = self.slots[0].leaf.device, self.dtype != self.slots[0].leaf.dtype
        each = [slot.each for slot in self.slots if slot.each is not None]
        last = [slot.last for slot in self.slots if slot.last is not None]
        if each and self._each is None:
            assert summed.each is not None
            self._each = PieceExchange(each, summed.each, self.dtype, device, not is_cast)
        if last and self._last is None:
            assert summed.last is not None
            is_packed = summed.adds or (is_cast and not each)
            self._last = PieceExchange(last, summed.last, self.dtype, device, not is_packed)

    def _add(self, gradients: Sequence[Tensor]) -> None:
        """Add what one backward has made to what those before it have, packed as it is summed."""
        gradients = [gradient.contiguous() for gradient in gradients]
        lengths = [gradient.numel() for gradient in gradients]
        put = copy_each if self.buffer is None else add_each
        if self.buffer is None:
            length = sum(lengths) if self._last is None else self._last.packing.numel
            self.buffer = gradients[0].new_empty(length, dtype=self.dtype)
        if self._last is None:
            own = self.buffer.split_with_sizes(lengths)
            put(own, [gradient.view(-1) for gradient in gradients])
        else:
            packing = self._last.packing
            put(packing.inside(self.buffer), packing.of(gradients))

    def give(self) -> dict[str, DTensor]:
        """The gradients after their sum, and the riders theirs; nothing is kept."""
        assert self.buffer is not None
        buffer, self.buffer, self.is_complete = self.buffer, None, False
        if self.copied is not None:
            self.copied.wait()
            self.copied = None
        cut = self._last or self._each
        if cut is not None:
            pieces = cut.own(buffer)
            return place_gradients(self.slots, pieces if cut.is_full else ensure_own_memory(pieces))
        found = split_like(buffer, [slot.leaf for slot in self.slots] + self.riders)
        for rider, total in zip(self.riders, found[len(self.slots) :]):
            rider.copy_(total)
        self.riders = []
        return place_gradients(self.slots, found[: len(self.slots)])

    def clear(self) -> None:
        """Forget what a pass that broke off has left."""
        if self.work is not None:
            wait_for(self.work)
        self.riders, self.buffer, self.is_complete = [], None, False
        self.sums, self.work, self.is_cutting, self.copied = None, None, False, None


def make_buckets(
    slots: Sequence[tuple[BucketEntry, Hashable]],
    cut: Mapping[Any, int] = NO_CUTS,
    buffer_bytes: int = BUFFER_BYTES,
) -> list[GradientBucket]:
    """Buckets for parameters and what tells their sums apart, in the order that backward fills.

    Those of the keys in `cut` hold no more than it says, and none with several parameters more than
    `buffer_bytes`.
    """

    def kind(slot: BucketEntry, key: Hashable) -> Hashable:
        return key, slot.leaf.dtype, slot.reduce

    limits = {kind(slot, key): cut[key] for slot, key in slots if key in cut}
    kinds = [(slot, kind(slot, key)) for slot, key in slots]
    keys = {kind(slot, key): key for slot, key in slots}
    return [
        GradientBucket(keys[found[0][1]], [slot for slot, _ in found], keys[found[0][1]] in cut)
        for found in fill_buckets(kinds, limits, buffer_bytes)
    ]


def take_gradients(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Gradients off the leaves of parameters that get one; zero where this rank made none."""
    gradients = []
    for leaf in leaves:
        gradient, leaf.grad = leaf.grad, None
        gradients.append(leaf.detach().new_zeros(leaf.shape) if gradient is None else gradient)
    return gradients


def place_gradients(
    slots: Sequence[BucketEntry], gradients: Iterable[Tensor]
) -> dict[str, DTensor]:
    """By name, this rank's pieces of gradients as DTensors, in the dtype of their parameters."""
    parameters = [slot.parameter for slot in slots]
    kept = [grad.to(parameter.dtype) for parameter, grad in zip(parameters, gradients)]
    return {s.name: grad for s, grad in zip(slots, dtensors_like(parameters, kept))}


class GradientSync:
    """Sums the gradients of a step, or of one backward pass, bucket by bucket."""

    def __init__(
        self,
        slots: Sequence[tuple[BucketEntry, Hashable]],
        sums: Mapping[Any, ReductionSpec],
        cut: Mapping[Any, int] = NO_CUTS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """`slots`: all that learn here, with a key of `sums`; without, no other rank has a part.
        `cut`: how much is cut together, by key."""
        self.slots, self._sums = [slot for slot, _ in slots], sums
        shared = [(slot, key) for slot, key in slots if key in sums]
        self.buckets = make_buckets(shared, cut, buffer_bytes)
        self._alone = [slot for slot, key in slots if key not in sums]
        self._due: dict[
            Hashable, list[GradientBucket]
        ] = {}  # of each key, those that are not yet summed
        self._reached: Set[str] = frozenset()
        self._waits = False  # what may wait is not summed in this pass
        self._now = NEVER
        self._under_way: list[GradientBucket] = []
        self._begin: dict[int, list[Hashable]] = {}
        for key, one in sums.items():
            for position in one.drains:
                self._begin.setdefault(position, []).append(key)
        # The last bucket is full when backward ends: it is summed then, and nobody needs to count.
        self._hooks = [
            slot.leaf.register_post_accumulate_grad_hook(partial(_count_arrival, ref(self), number))
            for number, bucket in enumerate(self.buckets[:-1])
            if any(sums[bucket.key].drains.values())
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
            bucket.clear()
        self._under_way.clear()
        self._due.clear()
        self._now = NEVER

    def start(self, reached: Set[str], waits: bool = False) -> None:
        """A step, or a backward pass, begins; it reaches these parameters, or some of them.

        `waits`: what may wait is summed by a later one (no_sync.py)."""
        self._due.clear()
        self._reached, self._waits = reached, waits

    def _is_left(self, bucket: GradientBucket) -> bool:
        is_own = all(slot.parameter.dtype == slot.leaf.dtype for slot in bucket.slots)
        return self._waits and is_own and self._sums[bucket.key].may_wait

    def left(self, reached: Set[str]) -> list[tuple[BucketEntry, Tensor]]:
        """What this rank has made of those gradients of `reached` that were not summed."""
        buckets = [bucket for bucket in self.buckets if self._is_left(bucket)]
        slots = [slot for one in buckets for slot in one.slots if slot.name in reached]
        return list(zip(slots, take_gradients([slot.leaf for slot in slots])))

    def after(self, position: int) -> None:
        """The action of a step at `position` is done: sum what is complete. The next one begins."""
        for key in self._begin.get(position, ()):
            if position < 0:
                self._expect(key)
            for bucket in self._due.pop(key, ()):
                self._start(bucket, position)
        self._finish_cuts()
        self._now = position + 1
        for key in self._begin.get(self._now, ()):
            self._expect(key)

    def _expect(self, key: Hashable) -> None:
        """Gradients of a key are about to arrive."""
        due = self._due[key] = []
        for bucket in self.buckets:
            count = len(bucket.names & self._reached)
            if bucket.key == key and count and not self._is_left(bucket):
                bucket.waiting = count
                due.append(bucket)

    def finish(self, reached: Set[str]) -> dict[str, DTensor]:
        """Wait for all sums: the gradients of `reached`, the same parameters on every rank."""
        self._now = NEVER
        self._due.clear()
        for bucket in self.buckets:
            is_needed = bucket.riders or not bucket.names.isdisjoint(reached)
            if not bucket.is_complete and is_needed and not self._is_left(bucket):
                self._start(bucket, self._sums[bucket.key].ready)
        while self._under_way:
            for bucket in list(self._under_way):
                self._go_on(bucket)
        grads: dict[str, DTensor] = {}
        for bucket in self.buckets:
            if bucket.is_complete:
                grads |= bucket.give()
        alone = [slot for slot in self._alone if slot.name in reached]
        grads |= place_gradients(alone, take_gradients([slot.leaf for slot in alone]))
        return {name: grad for name, grad in grads.items() if name in reached}

    def takes_along(self, late: DeferredSum) -> bool:
        """Whether a bucket of the coming pass sums a number of the program as well."""
        for bucket in self.buckets:
            group = self._sums[bucket.key].group
            if (
                not (bucket.alone or bucket.is_cut or self._sums[bucket.key].adds)
                and not self._is_left(bucket)
                and self._sums[bucket.key].link is None
                and late.tensor.dtype == bucket.slots[0].leaf.dtype
                and group is not None
                and late.group == group.group_name
            ):
                bucket.riders.append(late.tensor)
                return True
        return False

    def count(self, bucket: GradientBucket) -> None:
        """A gradient of a bucket has arrived: start the sums of those that are full now."""
        if self._sums[bucket.key].drains.get(self._now):
            bucket.waiting -= 1
            due = self._due.get(bucket.key)
            # In one order on all ranks, whatever fills first on each.
            while due and due[0].waiting == 0:
                self._start(due.pop(0), self._now)

    def _start(self, bucket: GradientBucket, position: int) -> None:
        summed = self._sums[bucket.key]
        if summed.is_cut:
            # A bucket is whole until it is cut: one at a time, beside the backward of the next.
            self._finish_cuts()
        if summed.link is not None:  # what is complete leaves the device
            for other in [one for one in self._under_way if one.is_complete]:
                while other in self._under_way:
                    self._go_on(other)
        bucket.is_complete = position == summed.ready
        bucket.sums = bucket.sum(summed, bucket.is_complete)
        self._under_way.append(bucket)
        self._go_on(bucket)

    def _finish_cuts(self) -> None:
        """Wait for what is being cut."""
        for bucket in [one for one in self._under_way if one.is_cutting]:
            self._go_on(bucket)

    def _go_on(self, bucket: GradientBucket) -> None:
        """Wait for a collective of a bucket, and begin the next."""
        assert bucket.sums is not None
        with torch.no_grad():
            if bucket.work is not None:
                wait_for(bucket.work)
            bucket.work = next(bucket.sums, None)
        if bucket.work is None:
            bucket.sums = None
            self._under_way.remove(bucket)


def _count_arrival(sync: ReferenceType[GradientSync], number: int, leaf: Tensor) -> None:
    """Tell a sync that a gradient of one of its buckets has arrived.

    A hook of a leaf lives as long as the leaf, where the garbage collector does not look: if it
    held the sync, the leaf would keep itself alive.
    """
    if (counting := sync()) is not None:
        counting.count(counting.buckets[number])
