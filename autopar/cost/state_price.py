"""StatePrice: the cost of keeping a parameter in its four places, besides that of its readers.

Once a step, the copy that lives through it is gathered, and the gradient's last reduction runs. For
each micro-batch, the copy that readers start from is gathered, forward and again backward, and the
gradient is brought to where it adds up. Latencies are shared in groups, as in a bucket. A copy that
is a slice of what an optimizer updates moves nothing.

Gathers before a use and sums behind backward overlap with neighbouring readers, which are assumed
to compute about as long as the parameter's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any, NamedTuple

import numpy as np

from autopar.cluster import Device
from autopar.collectives.redistribution import local_elements
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.collective import Collective
from autopar.cost.rooflines import HIDDEN
from autopar.layout import Layout, ParameterPlacement
from autopar.states import StateBytes

Axes = tuple[str, ...]
GATHERS, SUMS = "gathers of parameters", "sums of gradients"


class ParameterFacts(NamedTuple):
    """Facts of a parameter that the cost of its states depends on."""

    shape: tuple[int, ...]
    element: StateBytes  # bytes of one element
    learns: bool


class NodeCost(NamedTuple):
    """Predicted seconds of one node of a rewritten program, each time that it runs."""

    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0  # movements that run behind forward and backward
    reduced: float = 0.0  # the part of these that only a backward that is not split hides
    summed: float = 0.0  # once a step: its part in summing the gradients of parameters
    gathered: float = 0.0  # once a step: its part in gathering parameters
    # Once a step: copies of states to and from the host, and its slower update of these.
    updated: float = 0.0
    cast: float = 0.0  # once a step: its part in casting parameters
    covered: float = 0.0  # the part of `summed` and `gathered` that runs behind computing
    behind: float = 0.0  # the part of `updated` that does
    again: float = 0.0  # the part of backward that is forward once more

    @property
    def seconds(self) -> float:
        once = self.summed, self.gathered, self.updated, self.cast
        return math.fsum((self.forward, self.backward, self.hidden, *once))

    def __add__(self, other: NodeCost) -> NodeCost:  # type: ignore[override]
        return NodeCost(*map(add, self, other))

    def repeated(self, times: int) -> NodeCost:
        """Return the cost of `times` nodes that each take as long."""
        return self if times == 1 else NodeCost(*(times * part for part in self))

    def remade(self) -> NodeCost:
        """Return the cost of a node whose forward runs again in backward."""
        return self._replace(backward=self.backward + self.forward, again=self.forward)


@dataclass(frozen=True)
class OverlappedWork:
    """Seconds that readers compute each time they run, of one or (as arrays) of several ways."""

    forward: Any = 0.0
    backward: Any = 0.0
    learns: bool = True  # they have a backward, which reads what they read


@dataclass(frozen=True)
class StatePrice:
    """The price of the states of parameters whose gradients are summed behind backward."""

    price: ClusterPrice
    overlap: float  # how fast computing goes beside a collective, of its speed alone

    @cached_property
    def _device(self) -> Device:
        return self.price.cluster.device

    def whole(
        self,
        places: ParameterPlacement,
        facts: ParameterFacts,
        summed: Collection[str],
        overlapped: OverlappedWork,
    ) -> NodeCost:
        """Return a parameter's cost; readers leave its gradient a partial sum over `summed`."""
        left = set(summed).difference(places.scattered_axes)
        once = self.kept(places, facts, left, overlapped)
        return once + self.used(places, facts, summed, overlapped)

    def kept(
        self,
        places: ParameterPlacement,
        facts: ParameterFacts,
        sync: Collection[str],
        overlapped: OverlappedWork,
    ) -> NodeCost:
        """Return the cost of a parameter's gradient and copy, between optimizer and the place where
        readers gather."""
        shape, bytes_, learns = facts
        gathered = early = late = up = down = updated = 0.0
        for move in self.moved_once(places, facts, sync):
            seconds = float(self.price.bucketed(move.axes, move.bytes, move.kind))
            if move.when == "backward":
                early += seconds
            elif move.what == GATHERS:
                gathered += seconds
            else:
                late += seconds
        if places.goes_up == ("optimizer", "storage"):
            is_slice = places.optimizer.cuts_into(places.storage)
            part = places.storage if is_slice else places.optimizer
            up = self._copied(part, shape, bytes_.copy)
        covered, behind = self._hidden_in_turn(overlapped.forward, gathered, up)
        if not learns:
            return NodeCost(gathered=gathered, covered=covered, updated=up, behind=behind)
        if "optimizer" in places.on_host:
            updated = self._updated(places.optimizer, shape, bytes_)
            if "gradient" not in places.on_host:
                down = self._copied(places.optimizer, shape, bytes_.gradient)
        hidden, *more = self._hidden_in_turn(overlapped.backward, early, late, down)
        covered, behind = covered + more[0], behind + more[1]
        once = {"summed": late, "gathered": gathered, "updated": updated + up + down}
        parts = {"covered": covered, "behind": behind}
        return NodeCost(backward=early - hidden, hidden=hidden, **once, **parts)

    def _hidden_in_turn(self, computed: Any, *moved: float) -> list[Any]:
        """Return the seconds hidden of each of several movements: the first as far as computing
        can, the next by what is left."""
        parts, so_far, before = [], 0.0, 0.0
        for movement in moved:
            so_far += movement
            hidden = self.hidden(so_far, computed) if movement else before
            parts.append(hidden - before)
            before = hidden
        return parts

    def moved_once(
        self, places: ParameterPlacement, facts: ParameterFacts, sync: Collection[str]
    ) -> list[Collective]:
        """Return the collectives of `kept`; one of them reduces the gradient in each run.

        `sync`: the axes over which a use leaves the gradient a partial sum."""
        shape, bytes_, learns = facts
        once = _further_axes(places.storage, places.optimizer)
        copy = self._size(places.storage, shape, bytes_.copy)
        collectives = [Collective("all_gather", once, copy, "step", GATHERS)]
        if learns:
            first = tuple(a for a in _further_axes(places.storage, places.gradient) if a in sync)
            further = _further_axes(places.gradient, places.optimizer)
            last = tuple(axis for axis in further if axis in {*sync} - {*first})
            rest = tuple(axis for axis in sync if axis not in (*first, *last))
            early, late, whole = (
                self._size(at, shape, bytes_.gradient)
                for at in (places.storage, places.gradient, places.optimizer)
            )
            collectives += [
                Collective("reduce_scatter", first, early, "backward", SUMS),
                Collective("reduce_scatter", last, late, "step", SUMS),
                Collective("all_reduce", rest, whole, "step", SUMS),
            ]
        return [move for move in collectives if move.axes]

    def used(
        self,
        places: ParameterPlacement,
        facts: ParameterFacts,
        summed: Collection[str],
        overlapped: OverlappedWork,
    ) -> NodeCost:
        """Return the cost of gathering a parameter for readers and returning its gradient."""
        shape, bytes_, _ = facts
        seconds = {"forward": 0.0, "backward": 0.0}
        again = overlapped.learns
        for move in self.moved_for_use(places, facts, summed, is_read_again=again):
            seconds[move.when] += float(self.price.bucketed(move.axes, move.bytes, move.kind))
        if places.goes_up == ("storage", "working"):
            up = self._copied(places.storage, shape, bytes_.copy)
            seconds = {
                "forward": seconds["forward"] + up,
                "backward": seconds["backward"] + up * overlapped.learns,
            }
        forward, backward = seconds.values()
        ahead = self.hidden(forward, overlapped.forward)
        behind = self.hidden(backward, overlapped.backward)
        return NodeCost(forward - ahead, backward - behind, ahead + behind)

    def moved_for_use(
        self,
        places: ParameterPlacement,
        facts: ParameterFacts,
        summed: Collection[str],
        *,
        is_read_again: bool,
    ) -> list[Collective]:
        """Return the collectives of `used` in each run; backward may gather again."""
        shape, bytes_, learns = facts
        cut = _further_axes(places.working, places.storage)
        copy, whole = (
            self._size(places.working, shape, size) for size in (bytes_.copy, bytes_.gradient)
        )
        collectives = [Collective("all_gather", cut, copy, "forward", GATHERS)]
        if is_read_again:
            collectives.append(Collective("all_gather", cut, copy, "backward", GATHERS))
        if learns:
            scattered = tuple(axis for axis in places.scattered_axes if axis in summed)
            collectives.append(Collective("reduce_scatter", scattered, whole, "backward", SUMS))
        return [move for move in collectives if move.axes]

    def hidden(self, moved: Any, computed: Any) -> Any:
        """Return the seconds of a movement that computing hides."""
        is_moved = moved.any() if isinstance(moved, np.ndarray) else moved
        return HIDDEN(C=moved, o=self.overlap, K=computed) if is_moved else 0.0

    def _copied(self, at: Layout, shape: tuple[int, ...], itemsize: int) -> float:
        """Return the seconds of a copy between host and device, as part of a larger one."""
        size = local_elements(at.dims, shape, self.price.mesh) * itemsize
        return self._device.host.copied(size, size / self.price.buffer_bytes)

    def _updated(self, at: Layout, shape: tuple[int, ...], bytes_: StateBytes) -> float:
        """Return the seconds by which the host updates states more slowly than the device."""
        size = local_elements(at.dims, shape, self.price.mesh) * bytes_.updated
        host, device = self._device.host.bandwidth, self._device.throughput
        return max(0.0, size / host - size / device)

    def _size(self, at: Layout, shape: tuple[int, ...], itemsize: int) -> float:
        """Return the bytes of the largest piece of a tensor at `at`."""
        return float(local_elements(at.dims, shape, self.price.mesh) * itemsize)


def _further_axes(coarse: Layout, fine: Layout) -> Axes:
    """Return the axes that cut `fine` besides those that cut `coarse`."""
    return tuple(axis for axis in fine.axes if axis not in coarse.axes)
