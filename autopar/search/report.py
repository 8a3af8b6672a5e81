"""Report: the predicted time of a finished program, part by part, from the program itself.

The search adds up tables; this adds up the operators and movements that are there. The two agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import fx

from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.collectives import movement_cost
from autopar.cost.price import ClusterPrice
from autopar.search.candidates import Kinds
from autopar.search.decisions import Decisions
from autopar.search.origins import is_of_parameters


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one step, forward and backward."""

    compute: float  # of the busiest rank
    communication: float  # of all movements, and of summing gradients
    exposed: float  # the part of communication that nothing hides
    forward: float  # compute alone
    backward: float
    gradient_sync: float  # the part of communication that sums gradients
    bubble: float = 0.0  # how long the busiest rank of a pipeline waits

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.bubble

    def times(self, microbatches: int) -> Cost:
        """Of a step in micro-batches: gradients are summed once."""
        moved = (self.communication - self.gradient_sync) * microbatches
        hidden = self.communication - self.exposed
        return Cost(
            compute=self.compute * microbatches,
            communication=moved + self.gradient_sync,
            exposed=moved + self.gradient_sync - hidden,
            forward=self.forward * microbatches,
            backward=self.backward * microbatches,
            gradient_sync=self.gradient_sync,
        )

    def to_json(self) -> dict[str, float]:
        return {"seconds": self.seconds, **asdict(self)}


def program_cost(
    captured: Captured, decisions: Decisions, graph: fx.Graph, cluster: Cluster
) -> Cost:
    """The cost of the rewritten `graph` that follows from `decisions`."""
    mesh = decisions.mesh
    price = ClusterPrice(cluster, mesh)
    kinds = Kinds(captured, mesh, cluster.device, price)
    forward = backward = moved = summed = 0.0
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        there, back = kinds.seconds(node, decisions.strategies.get(node.name))
        forward, backward = forward + there, backward + back
    for node in graph.nodes:
        movement = node.meta.get("movement")
        if movement is not None:
            before = node.args[0].meta["type"]
            if movement.kind == "identity" and is_of_parameters(node.args[0], captured):
                summed += float(price.bucketed(movement.axes, before.local_bytes(mesh)))
                continue
            moved += movement_cost(
                movement,
                before.layout,
                before.shape,
                before.dtype.itemsize,
                mesh,
                price,
                node.meta["differentiable"],
            )
        elif node.meta.get("sync"):
            summed += float(price.bucketed(node.meta["sync"], node.meta["type"].local_bytes(mesh)))
    hidden = summed * cluster.device.overlap
    return Cost(
        compute=forward + backward,
        communication=moved + summed,
        exposed=moved + summed - hidden,
        forward=forward,
        backward=backward,
        gradient_sync=summed,
    )
