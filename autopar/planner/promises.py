"""Promises: in which order sizes are weighed, and what a step in so many stages takes at least.

promises = Promises(captured, request, ideal)
promises.of(4, 16)              # the least comes first: seconds, as far as one can tell
promises.known[4, 8] = 0.1      # with the fastest layouts, if there were all memory
promises.least(4, 16)           # then 0.1 at least: smaller micro-batches take no less in all
"""

from __future__ import annotations

from functools import cached_property

from autopar.capture.captured import Captured
from autopar.cost.footprint import parameter_bytes
from autopar.cost.saved_tensors import kept_bytes
from autopar.layout import Layout, ParameterPlacement
from autopar.mesh import Mesh
from autopar.planner.ideal import Ideal
from autopar.planner.request import Request
from autopar.strategies.node_info import info

AGAIN = 1.15  # times what a step takes, where some of its forward runs again


class Promises:
    """What sizes promise, the better the more is known of their layouts."""

    def __init__(self, captured: Captured, request: Request, ideal: Ideal) -> None:
        self._captured, self._request, self._ideal = captured, request, ideal
        self.known: dict[tuple[int, int], float] = {}  # seconds by stages and micro-batches

    def of(self, stages: int, parts: int) -> tuple[float, int]:
        """What a step is likely to take, with stages that wait for one another and with what has to
        run again to fit. Where states have to be cut, many micro-batches leave most room."""
        run = parts / stages * self._ideal.run(parts * self._request.meshes(stages)[0].size)
        waits = 1 + (stages - 1) / parts / 2
        live = self.states + self.kept * min(stages, parts) / parts
        again = AGAIN if live / self._request.cluster.devices > self._request.roomiest else 1.0
        most_room = -parts if self.states > self._request.memory else 0
        return max(run, self.least(stages, parts)) * waits * again, most_room

    def least(self, stages: int, parts: int) -> float:
        """What a step takes in so many stages: the smaller its micro-batches are, the more it
        takes, whatever layouts it has."""
        known = self.known.items()
        return max((t for (n, m), t in known if n == stages and m <= parts), default=0.0)

    @cached_property
    def states(self) -> float:
        """The bytes of parameters, their gradients and what an optimizer keeps of them."""
        found = 0
        for node in self._captured.graph.find_nodes(op="placeholder"):
            if node.name in self._captured.parameters:
                whole = ParameterPlacement.tied(Layout.replicated(info(node).val.ndim))
                found += sum(parameter_bytes(node, whole, Mesh(x=1))) * info(node).times
        return float(found)

    @cached_property
    def kept(self) -> float:
        """The bytes that a program keeps for backward."""
        return kept_bytes(self._captured)
