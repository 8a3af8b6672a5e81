"""The bytes of the gradients of parameters in one backward pass of a program.

A gradient counts from the call that computes it until its bucket is summed over the ranks, as the
runtime does it (`runtime/parameters/gradient_buckets.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.capture.origins import state_bytes
from autopar.collectives.redistribution import local_elements
from autopar.cost.bucket_prices import (
    BucketConfig,
    ParameterGradient,
    PlannedBucket,
    placement_of,
    program_buckets,
)
from autopar.mesh import Mesh
from autopar.pipeline.memory.memory_holders import LiveBytes
from autopar.strategies.node_info import info

Key = tuple[fx.Node, int]  # a parameter, and the number of its copy if it stands for several


class GradientBytes:
    """Follow the bytes of a program's parameter gradients through backward."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, travel: BucketConfig) -> None:
        self._mesh = mesh
        self._sums = program_buckets(graph, mesh, travel)
        self._last = self._sums[-1] if self._sums else None
        self._sum_of = {_key(g): (bucket, g) for bucket in self._sums for g in bucket.gradients}
        self._missing = {bucket: {_key(g) for g in bucket.gradients} for bucket in self._sums}
        self._place = {bucket: at for at, bucket in enumerate(self._sums)}
        self._complete: list[PlannedBucket] = []  # and not begun
        self._held = LiveBytes()  # gradients that wait for their sum
        self._running: PlannedBucket | None = None  # the sum in progress
        self._first: dict[PlannedBucket, float] = {}  # bytes that stay after a sum
        self._learned: dict[Key, float] = {}
        self.there = 0.0  # bytes of gradients that stay, so far
        # Additional bytes in the last run, which sums the accumulated gradients.
        self.last = 0.0
        self.passing = 0.0  # of these, the bytes that are freed by the sum

    @property
    def learned(self) -> dict[str, float]:
        """Return the bytes that stay, by placeholder."""
        sizes: dict[str, float] = {}
        for (parameter, _), size in self._learned.items():
            sizes[parameter.name] = sizes.get(parameter.name, 0.0) + size
        return sizes

    @property
    def waiting(self) -> float:
        """Return the bytes of gradients that wait for their sum."""
        return self._held.bytes

    def arrive(self, parameter: fx.Node, copy: int = 0) -> None:
        """Add a gradient: the first one stays, later ones add to it; or it waits for its sum."""
        key = parameter, copy
        if key not in self._sum_of:
            self._stay(key, self._kept(parameter))
            return
        bucket, gradient = self._sum_of[key]
        if key in self._missing[bucket]:
            self._missing[bucket].discard(key)
            if not self._missing[bucket]:
                self._complete.append(bucket)
        if not bucket.waits:
            self._stay(key, gradient.kept)
        elif key not in self._learned:
            self._learned[key] = gradient.kept
            self._first[bucket] = self._first.get(bucket, 0.0) + gradient.kept
            self._held.take(key, gradient.whole)

    def at_once(self) -> frozenset[str]:
        """Return the parameters whose gradients do not wait for a sum."""
        waiting = {g.parameter.name for bucket in self._first for g in bucket.gradients}
        return frozenset(key.name for key, _ in self._learned if key.name not in waiting)

    def begin(self, *, is_end: bool) -> Iterator[tuple[float, float]]:
        """Sum the complete buckets, at the end of backward all with gradients, one after the other.

        Yields the additional bytes while each sum begins: in every run, and only in the last one.
        """
        # The last bucket is full when backward ends.
        complete = sorted(self._complete, key=self._place.__getitem__)
        begun = [*self._sums] if is_end else [b for b in complete if b is not self._last]
        self._complete = [] if is_end else [b for b in complete if b is self._last]
        for bucket in begun:
            self._sums.remove(bucket)
            if len(self._missing[bucket]) == len(bucket.gradients):
                continue
            self._finish()
            yield (bucket.begins, 0.0) if bucket.waits else (0.0, bucket.begins)
            self._reduce(bucket)
        if is_end:
            self._finish()

    def _reduce(self, bucket: PlannedBucket) -> None:
        if bucket.waits:
            for gradient in bucket.gradients:
                if _key(gradient) in self._learned:
                    self._held.let_go(_key(gradient))
            self._held.take(bucket, bucket.goes_on)
        else:
            self.last += bucket.goes_on - bucket.whole
            self.passing = bucket.goes_on - bucket.part
        self._running = bucket

    def _finish(self) -> None:
        bucket, self._running = self._running, None
        if bucket is None:
            return
        if bucket.waits:
            self._held.let_go(bucket)
            self.there += self._first.pop(bucket, 0.0)
        else:
            self.last += bucket.part - bucket.goes_on
            self.passing = 0.0

    def _stay(self, key: Key, size: float) -> None:
        if key not in self._learned:
            self._learned[key] = size
            self.there += size

    def _kept(self, parameter: fx.Node) -> float:
        places, whole = placement_of(parameter), tuple(info(parameter).val.shape)
        if "gradient" in places.on_host:
            return 0.0
        elements = local_elements(places.gradient.dims, whole, self._mesh)
        return float(elements * state_bytes(parameter).gradient)


def _key(gradient: ParameterGradient) -> Key:
    return gradient.parameter, gradient.copy
