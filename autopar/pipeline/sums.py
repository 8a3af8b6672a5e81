"""Sums: what the gradients of parameters take in one run of a program backward, from when they are
made to when their buckets are summed, as the runtime does it (`runtime/buckets.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.capture.origins import state_bytes
from autopar.collectives.redistribution import local_elements
from autopar.cost.buckets import SumOf, Travel, places_of, sums_of
from autopar.mesh import Mesh
from autopar.pipeline.held import Held
from autopar.strategies.node_info import info


class Sums:
    """Follows the gradients of a program's parameters."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, travel: Travel, flowing: Held) -> None:
        """Those that do not stay as they are come to `flowing`."""
        self._mesh, self._flowing = mesh, flowing
        self._sums = sums_of(graph, mesh, travel)
        self._sum_of = {g.parameter: (one, g) for one in self._sums for g in one.gradients}
        self._missing = {one: {g.parameter for g in one.gradients} for one in self._sums}
        self._going_on: SumOf | None = None  # it is cut
        self._first: dict[SumOf, float] = {}  # bytes of the gradients that come to stay
        self.learned: dict[str, float] = {}  # by placeholder, the bytes that stay
        self.there = 0.0  # those that are there
        # By how many bytes there is more in the last run, which sums what has added up.
        self.last = 0.0

    def arrive(self, parameter: fx.Node) -> None:
        """A gradient: the first one stays, and any more are added to it; or it waits for those with
        which it is summed."""
        if parameter not in self._sum_of:
            self._stay(parameter, self._kept(parameter))
            return
        one, gradient = self._sum_of[parameter]
        self._missing[one].discard(parameter)
        if not one.waits:
            self._stay(parameter, gradient.kept)
        elif parameter.name not in self.learned:
            self.learned[parameter.name] = gradient.kept
            self._first[one] = self._first.get(one, 0.0) + gradient.kept
            self._flowing.take(parameter, gradient.whole)

    def are_waiting(self, name: str) -> bool:
        """Whether a parameter's gradient is not yet where it stays."""
        return any(g.parameter.name == name for one in self._first for g in one.gradients)

    def begin(self, all_: bool = False) -> Iterator[tuple[float, float]]:
        """Sum what is complete, or all that is there, one bucket after the other. Yields the bytes
        that are taken besides while a sum begins, and how many more if the run is the last."""
        # The last bucket is full when backward ends.
        for one in [*self._sums] if all_ else [o for o in self._sums[:-1] if not self._missing[o]]:
            self._sums.remove(one)
            if len(self._missing[one]) == len(one.gradients):
                continue
            self._finish()
            yield (one.begins, 0.0) if one.waits else (0.0, one.begins)
            self._go_on(one)
        if all_:
            self._finish()

    def _go_on(self, one: SumOf) -> None:
        if one.waits:
            for gradient in one.gradients:
                if gradient.parameter.name in self.learned:
                    self._flowing.let_go(gradient.parameter)
            self._flowing.take(one, one.goes_on)
        else:
            self.last += one.goes_on - one.whole
        self._going_on = one

    def _finish(self) -> None:
        one, self._going_on = self._going_on, None
        if one is None:
            return
        if one.waits:
            self._flowing.let_go(one)
            self.there += self._first.pop(one, 0.0)
        else:
            self.last += one.part - one.goes_on

    def _stay(self, parameter: fx.Node, size: float) -> None:
        if parameter.name not in self.learned:
            self.learned[parameter.name] = size
            self.there += size

    def _kept(self, parameter: fx.Node) -> float:
        places, whole = places_of(parameter), tuple(info(parameter).val.shape)
        if "gradient" in places.on_host:
            return 0.0
        elements = local_elements(places.gradient.dims, whole, self._mesh)
        return float(elements * state_bytes(parameter).gradient)
