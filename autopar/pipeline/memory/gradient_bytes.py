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
from autopar.pipeline.memory.memory_holders import Held
from autopar.strategies.node_info import info

Key = tuple[fx.Node, int]  # a parameter; of one that stands for several, which of them


class Sums:
    """Follows the gradients of a program's parameters."""

    def __init__(
        self, graph: fx.Graph, mesh: Mesh, travel: BucketConfig, times: int | None = None
    ) -> None:
        """`times`: as many are those that stand for others."""
        self._mesh = mesh
        self._sums = program_buckets(graph, mesh, travel, times)
        self._last = self._sums[-1] if self._sums else None
        self._sum_of = {_key(g): (one, g) for one in self._sums for g in one.gradients}
        self._missing = {one: {_key(g) for g in one.gradients} for one in self._sums}
        self._place = {one: at for at, one in enumerate(self._sums)}
        self._complete: list[PlannedBucket] = []  # and not begun
        self._held = Held()  # those that do not stay as they are
        self._going_on: PlannedBucket | None = None  # it is cut
        self._first: dict[PlannedBucket, float] = {}  # bytes of the gradients that come to stay
        self._learned: dict[Key, float] = {}
        self.there = 0.0  # those that are there
        # By how many bytes there is more in the last run, which sums what has added up.
        self.last = 0.0
        self.passing = 0.0  # of these, what goes when they are summed

    @property
    def learned(self) -> dict[str, float]:
        """By placeholder, the bytes that stay."""
        found: dict[str, float] = {}
        for (parameter, _), size in self._learned.items():
            found[parameter.name] = found.get(parameter.name, 0.0) + size
        return found

    @property
    def waiting(self) -> float:
        """The bytes of those that do not stay as they are."""
        return self._held.bytes

    def arrive(self, parameter: fx.Node, copy: int = 0) -> None:
        """A gradient: the first one stays, and any more are added to it; or it waits for those with
        which it is summed."""
        key = parameter, copy
        if key not in self._sum_of:
            self._stay(key, self._kept(parameter))
            return
        one, gradient = self._sum_of[key]
        if key in self._missing[one]:
            self._missing[one].discard(key)
            if not self._missing[one]:
                self._complete.append(one)
        if not one.waits:
            self._stay(key, gradient.kept)
        elif key not in self._learned:
            self._learned[key] = gradient.kept
            self._first[one] = self._first.get(one, 0.0) + gradient.kept
            self._held.take(key, gradient.whole)

    def at_once(self) -> frozenset[str]:
        """The parameters whose gradients are where they stay."""
        waiting = {g.parameter.name for one in self._first for g in one.gradients}
        return frozenset(key.name for key, _ in self._learned if key.name not in waiting)

    def begin(self, all_: bool = False) -> Iterator[tuple[float, float]]:
        """Sum what is complete, or all that is there, one bucket after the other. Yields the bytes
        that are taken besides while a sum begins, and how many more if the run is the last."""
        # The last bucket is full when backward ends.
        complete = sorted(self._complete, key=self._place.__getitem__)
        begun = [*self._sums] if all_ else [one for one in complete if one is not self._last]
        self._complete = [] if all_ else [one for one in complete if one is self._last]
        for one in begun:
            self._sums.remove(one)
            if len(self._missing[one]) == len(one.gradients):
                continue
            self._finish()
            yield (one.begins, 0.0) if one.waits else (0.0, one.begins)
            self._go_on(one)
        if all_:
            self._finish()

    def _go_on(self, one: PlannedBucket) -> None:
        if one.waits:
            for gradient in one.gradients:
                if _key(gradient) in self._learned:
                    self._held.let_go(_key(gradient))
            self._held.take(one, one.goes_on)
        else:
            self.last += one.goes_on - one.whole
            self.passing = one.goes_on - one.part
        self._going_on = one

    def _finish(self) -> None:
        one, self._going_on = self._going_on, None
        if one is None:
            return
        if one.waits:
            self._held.let_go(one)
            self.there += self._first.pop(one, 0.0)
        else:
            self.last += one.part - one.goes_on
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
