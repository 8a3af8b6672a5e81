"""Sum gradients over their ranks in buckets, beside what is left of backward and of the schedule.

A parameter lies on every rank that holds a stage that reads it. Its gradient is complete after the
last backward of these stages. A bucket has parameters of one dtype and one set of ranks, from the
last to the first. When all its gradients are complete, they are copied to one flat buffer, which is
summed asynchronously; the gradients are views of it. A large gradient is summed where it lies.

Gradients that are kept in pieces are reduce-scattered after each backward of a micro-batch, and the
pieces add up. Where only optimizer states are cut, one reduce-scatter ends the step. Gradients that
add up in another dtype than backward's are added to a buffer of that dtype after each backward.
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
from autopar.pipeline.running.movement_spans import Begin, MovementSpan, names_text, not_recorded
from autopar.runtime.backends.host_copies import PendingCopy
from autopar.runtime.parameters.flat_buffers import TensorPieces
from autopar.runtime.parameters.piece_exchange import PieceExchange, works_of
from autopar.runtime.parameters.placing import ensure_own_memory
from autopar.runtime.parameters.reduction_spec import ReductionSpec
from autopar.states import BUFFER_BYTES

NEVER = -2  # no position in an order of actions
NO_CUTS: Mapping[Hashable, int] = MappingProxyType({})

# The collectives of a bucket, each begun when the last is done.
Collectives = Generator[PendingWork, None, None]


@dataclass
class BucketEntry:
    """One parameter in a bucket, and the leaf whose gradient autograd fills."""

    name: str
    leaf: Tensor
    parameter: Tensor  # the DTensor of which the leaf is a piece or a copy
    size: int  # bytes of the largest piece: all ranks form the same buckets, whatever is theirs
    # How the gradient is cut after each backward, and at the end of a step; None: not at all.
    backward_pieces: TensorPieces | None = None
    step_pieces: TensorPieces | None = None
    reduce: torch.dtype | None = None  # in which it adds up; None: that of the leaf


@dataclass(eq=False)
class GradientBucket:
    """Parameters whose gradients are summed together."""

    key: Hashable
    entries: list[BucketEntry] = field(default_factory=list)
    is_cut: bool = False
    buffer: Tensor | None = None  # flat, what is summed: all gradients, then the riders
    riders: list[Tensor] = field(default_factory=list)  # numbers that are summed along
    waiting: int = 0  # gradients that have not arrived
    is_complete: bool = False  # its last sum has begun
    collectives: Collectives | None = None  # that are under way
    is_cutting: bool = False  # a reduce-scatter is under way
    work: PendingWork | None = None  # the collective to wait for
    span: MovementSpan | None = None  # of the collective, in a recorded step
    copied: PendingCopy | None = None  # to the host
    _backward_exchange: PieceExchange | None = None
    _step_exchange: PieceExchange | None = None

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(entry.name for entry in self.entries)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which gradients add up."""
        return self.entries[0].reduce or self.entries[0].leaf.dtype

    @property
    def is_alone(self) -> bool:
        """Return whether the bucket is one gradient that is worth its own collective."""
        return not self.is_cut and len(self.entries) == 1 and self.size >= SINGLE_BUCKET_BYTES

    def reduce(self, spec: ReductionSpec, position: int) -> Collectives:
        """Sum the gradients that backward has made since the last call; finally over all ranks.

        `position`: that of the action after which this is called.
        """
        is_last = position == spec.last_action
        # A later action than that of the last backward finds its gradients in the buffer.
        is_taken = spec.is_by_backward and position not in spec.completing_actions
        is_taken &= self.buffer is not None
        gradients = [] if is_taken else take_gradients([entry.leaf for entry in self.entries])
        self._prepare_exchanges(spec)
        if self._backward_exchange is not None:
            if not is_taken:
                part, work = self._backward_exchange.scatter(gradients)
                gradients.clear()
                yield from self._cut(work)
                self.buffer = part if self.buffer is None else self.buffer.add_(part)
                del part, work
            if not is_last:
                return
            assert self.buffer is not None
            gradients = self._backward_exchange.split_part(self.buffer)
        elif spec.is_accumulated:
            if not is_taken:
                self._accumulate(gradients)
                gradients.clear()
            if not is_last:
                return
        if self._step_exchange is not None:
            flat = self.buffer if spec.is_accumulated else None
            self.buffer, work = self._step_exchange.scatter(gradients, flat)
            del flat
            gradients.clear()
            yield from self._cut(work)
        if not (spec.is_cut or spec.is_accumulated):
            self.buffer = joined_flat(gradients + self.riders)  # a single tensor is not copied
        gradients.clear()
        if spec.all_reduce_group is not None:
            assert self.buffer is not None
            yield dist.all_reduce(self.buffer, group=spec.all_reduce_group, async_op=True)
        if spec.link is not None:
            assert self.buffer is not None
            self.buffer, self.copied = spec.link.download(self.buffer)

    def _cut(self, work: PendingWork) -> Collectives:
        self.is_cutting = True
        yield work
        self.is_cutting = False

    def _prepare_exchanges(self, spec: ReductionSpec) -> None:
        """Make the exchanges that cut the gradients, at the first call."""
        entries, dtype = self.entries, self.dtype
        device, is_cast = entries[0].leaf.device, dtype != entries[0].leaf.dtype
        by_backward = [e.backward_pieces for e in entries if e.backward_pieces is not None]
        by_step = [e.step_pieces for e in entries if e.step_pieces is not None]
        if by_backward and self._backward_exchange is None:
            assert spec.backward_group is not None
            self._backward_exchange = PieceExchange(
                by_backward, spec.backward_group, dtype, device, may_go_straight=not is_cast
            )
        if by_step and self._step_exchange is None:
            assert spec.step_group is not None
            is_packed = spec.is_accumulated or (is_cast and not by_backward)
            self._step_exchange = PieceExchange(
                by_step, spec.step_group, dtype, device, may_go_straight=not is_packed
            )

    def _accumulate(self, gradients: Sequence[Tensor]) -> None:
        """Add one backward's gradients to the buffer, in the order in which it is summed."""
        gradients = [gradient.contiguous() for gradient in gradients]
        lengths = [gradient.numel() for gradient in gradients]
        put = copy_each if self.buffer is None else add_each
        exchange = self._step_exchange
        if self.buffer is None:
            length = sum(lengths) if exchange is None else exchange.packing.numel
            self.buffer = gradients[0].new_empty(length, dtype=self.dtype)
        if exchange is None:
            views = self.buffer.split_with_sizes(lengths)
            put(views, [gradient.view(-1) for gradient in gradients])
        else:
            packing = exchange.packing
            put(packing.split_buffer(self.buffer), packing.split_tensors(gradients))

    def take_sums(self) -> dict[str, DTensor]:
        """Return the summed gradients by name, fill the riders, and let go of both."""
        assert self.buffer is not None
        buffer, self.buffer, self.is_complete = self.buffer, None, False
        if self.copied is not None:
            self.copied.wait()
            self.copied = None
        exchange = self._step_exchange or self._backward_exchange
        if exchange is not None:
            pieces = exchange.split_part(buffer)
            pieces = pieces if exchange.is_full else ensure_own_memory(pieces)
            return place_gradients(self.entries, pieces)
        sums = split_like(buffer, [entry.leaf for entry in self.entries] + self.riders)
        for rider, total in zip(self.riders, sums[len(self.entries) :]):
            rider.copy_(total)
        self.riders = []
        return place_gradients(self.entries, sums[: len(self.entries)])

    def clear(self) -> None:
        """Forget the collectives and sums of a pass that broke off."""
        if self.work is not None:
            wait_for(self.work)
        self.riders, self.buffer, self.is_complete = [], None, False
        self.collectives, self.work, self.is_cutting, self.copied = None, None, False, None
        self.span = None


def make_buckets(
    entries: Sequence[tuple[BucketEntry, Hashable]],
    cut: Mapping[Any, int] = NO_CUTS,
    buffer_bytes: int = BUFFER_BYTES,
) -> list[GradientBucket]:
    """Group parameters by the keys of their sums, in the order in which backward fills buckets.

    A bucket with a key in `cut` holds at most so many bytes, and one with several parameters at
    most `buffer_bytes`.
    """

    def kind(entry: BucketEntry, key: Hashable) -> Hashable:
        return key, entry.leaf.dtype, entry.reduce

    limits = {kind(entry, key): cut[key] for entry, key in entries if key in cut}
    kinds = [(entry, kind(entry, key)) for entry, key in entries]
    keys = {kind(entry, key): key for entry, key in entries}
    return [
        GradientBucket(keys[group[0][1]], [entry for entry, _ in group], keys[group[0][1]] in cut)
        for group in fill_buckets(kinds, limits, buffer_bytes)
    ]


def take_gradients(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Take the gradients off leaves; zeros where this rank made none."""
    gradients = []
    for leaf in leaves:
        gradient, leaf.grad = leaf.grad, None
        gradients.append(leaf.detach().new_zeros(leaf.shape) if gradient is None else gradient)
    return gradients


def place_gradients(
    entries: Sequence[BucketEntry], gradients: Iterable[Tensor]
) -> dict[str, DTensor]:
    """Make DTensors of this rank's pieces of gradients, by name, in their parameters' dtypes."""
    parameters = [entry.parameter for entry in entries]
    cast = [grad.to(parameter.dtype) for parameter, grad in zip(parameters, gradients)]
    return {e.name: grad for e, grad in zip(entries, dtensors_like(parameters, cast))}


class GradientSync:
    """The sums of the gradients of a step, or of one backward pass, bucket by bucket."""

    def __init__(
        self,
        entries: Sequence[tuple[BucketEntry, Hashable]],
        specs: Mapping[Any, ReductionSpec],
        cut: Mapping[Any, int] = NO_CUTS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Sum `entries`, the trainable parameters of this rank, each by the spec of its key.

        A key without a spec needs no other rank. `cut` limits the bytes that are cut together.
        """
        self.entries, self._specs = [entry for entry, _ in entries], specs
        shared = [(entry, key) for entry, key in entries if key in specs]
        self.buckets = make_buckets(shared, cut, buffer_bytes)
        self._unshared = [entry for entry, key in entries if key not in specs]
        # By key, the buckets that are still to be summed.
        self._due: dict[Hashable, list[GradientBucket]] = {}
        self._reached: Set[str] = frozenset()
        self._is_deferred = False  # sums that may wait are left to a later pass
        self._now = NEVER
        self.begin: Begin = not_recorded  # the span of a collective
        self._under_way: list[GradientBucket] = []
        self._keys_at: dict[int, list[Hashable]] = {}
        for key, spec in specs.items():
            for position in spec.reduce_actions:
                self._keys_at.setdefault(position, []).append(key)
        # The last bucket is full when backward ends: it is summed then, and nobody needs to count.
        this = ref(self)
        self._hooks = [
            entry.leaf.register_post_accumulate_grad_hook(partial(_count_arrival, this, number))
            for number, bucket in enumerate(self.buckets[:-1])
            if any(specs[bucket.key].reduce_actions.values())
            for entry in bucket.entries
        ]

    def close(self) -> None:
        """Remove the hooks, so that another sync can sum these gradients."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget the gradients and sums of a pass that broke off."""
        for entry in self.entries:
            entry.leaf.grad = None
        for bucket in self.buckets:
            bucket.clear()
        self._under_way.clear()
        self._due.clear()
        self._now = NEVER

    def start(self, reached: Set[str], *, is_deferred: bool = False) -> None:
        """Begin a step, or a backward pass, which reaches some of the parameters in `reached`.

        `is_deferred` leaves sums that may wait to a later pass, as in `no_sync()`."""
        self._due.clear()
        self._reached, self._is_deferred = reached, is_deferred

    def _is_left(self, bucket: GradientBucket) -> bool:
        is_same_dtype = all(e.parameter.dtype == e.leaf.dtype for e in bucket.entries)
        return self._is_deferred and is_same_dtype and self._specs[bucket.key].may_wait

    def take_deferred(self, reached: Set[str]) -> list[tuple[BucketEntry, Tensor]]:
        """Take this rank's terms of those gradients of `reached` that were not summed."""
        buckets = [bucket for bucket in self.buckets if self._is_left(bucket)]
        entries = [e for bucket in buckets for e in bucket.entries if e.name in reached]
        return list(zip(entries, take_gradients([entry.leaf for entry in entries])))

    def action_done(self, position: int) -> None:
        """Sum the gradients that the step's action at `position` has completed."""
        for key in self._keys_at.get(position, ()):
            if position < 0:
                self._expect(key)
            for bucket in self._due.pop(key, ()):
                self._start(bucket, position)
        self._finish_cuts()
        self._now = position + 1
        for key in self._keys_at.get(self._now, ()):
            self._expect(key)

    def _expect(self, key: Hashable) -> None:
        """Prepare the buckets of a key for the gradients of the coming action."""
        due = self._due[key] = []
        for bucket in self.buckets:
            count = len(bucket.names & self._reached)
            if bucket.key == key and count and not self._is_left(bucket):
                bucket.waiting = count
                due.append(bucket)

    def finish(self, reached: Set[str]) -> dict[str, DTensor]:
        """Wait for all sums, and return the gradients of `reached` by name.

        `reached` has the same parameters on every rank."""
        self._now = NEVER
        self._due.clear()
        for bucket in self.buckets:
            is_needed = bucket.riders or not bucket.names.isdisjoint(reached)
            if not bucket.is_complete and is_needed and not self._is_left(bucket):
                self._start(bucket, self._specs[bucket.key].last_action)
        while self._under_way:
            for bucket in list(self._under_way):
                self._continue(bucket)
        grads: dict[str, DTensor] = {}
        for bucket in self.buckets:
            if bucket.is_complete:
                grads |= bucket.take_sums()
        unshared = [entry for entry in self._unshared if entry.name in reached]
        grads |= place_gradients(unshared, take_gradients([entry.leaf for entry in unshared]))
        return {name: grad for name, grad in grads.items() if name in reached}

    def adds_rider(self, late: DeferredSum) -> bool:
        """Add a number of the program to a bucket of the coming pass; return whether one fits."""
        for bucket in self.buckets:
            spec = self._specs[bucket.key]
            group = spec.all_reduce_group
            if (
                not (bucket.is_alone or bucket.is_cut or spec.is_accumulated)
                and not self._is_left(bucket)
                and spec.link is None
                and late.tensor.dtype == bucket.entries[0].leaf.dtype
                and group is not None
                and late.group == group.group_name
            ):
                bucket.riders.append(late.tensor)
                return True
        return False

    def count(self, bucket: GradientBucket) -> None:
        """Count a gradient that has arrived, and start to sum the buckets that are full now."""
        if self._specs[bucket.key].reduce_actions.get(self._now):
            bucket.waiting -= 1
            due = self._due.get(bucket.key)
            # In one order on all ranks, whatever fills first on each.
            while due and due[0].waiting == 0:
                self._start(due.pop(0), self._now)

    def _start(self, bucket: GradientBucket, position: int) -> None:
        spec = self._specs[bucket.key]
        if spec.is_cut:
            # A bucket is uncut until its sum ends: one at a time, beside the backward of the next.
            self._finish_cuts()
        if spec.link is not None:  # complete sums leave the device
            for other in [bucket for bucket in self._under_way if bucket.is_complete]:
                while other in self._under_way:
                    self._continue(other)
        bucket.is_complete = position == spec.last_action
        bucket.collectives = bucket.reduce(spec, position)
        self._under_way.append(bucket)
        self._continue(bucket)

    def _finish_cuts(self) -> None:
        """Wait for the reduce-scatters under way."""
        for bucket in [bucket for bucket in self._under_way if bucket.is_cutting]:
            self._continue(bucket)

    def _continue(self, bucket: GradientBucket) -> None:
        """Wait for a collective of a bucket, and begin the next."""
        assert bucket.collectives is not None
        with torch.no_grad():
            if bucket.work is not None:
                wait_for(bucket.work)
            if bucket.span is not None:
                bucket.span.finish()
            bucket.work = next(bucket.collectives, None)
            bucket.span = None if bucket.work is None else self._span(bucket)
        if bucket.work is None:
            bucket.collectives = None
            self._under_way.remove(bucket)

    def _span(self, bucket: GradientBucket) -> MovementSpan | None:
        """Return the span of the collective that a bucket has begun."""
        span = self.begin(f"sum of {names_text([entry.name for entry in bucket.entries])}")
        if span is not None and bucket.entries[0].leaf.device.type == "cpu":
            span.watch(works_of(bucket.work))
        return span


def _count_arrival(sync: ReferenceType[GradientSync], number: int, leaf: Tensor) -> None:
    """Tell a sync that a gradient of one of its buckets has arrived.

    A hook of a leaf lives as long as the leaf, where the garbage collector does not look. If it
    held the sync, the leaf would keep itself alive.
    """
    if (living := sync()) is not None:
        living.count(living.buckets[number])
