"""Report: the predicted time of a finished program, part by part, from the program itself.

Every node of a rewritten program has one price, from what the node itself carries. The search adds
up tables; this adds up the nodes that are there, as the stages of a pipeline do. They agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import fx

from autopar.capture.origins import is_made_of_parameters
from autopar.cluster import Cluster
from autopar.collectives import Movement, movement_cost
from autopar.cost.operators import ShardSizes, seconds, work
from autopar.cost.price import ClusterPrice
from autopar.layout import TensorType
from autopar.mesh import Mesh
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from autopar.strategies.rule import Facts


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


@dataclass(frozen=True)
class NodeCost:
    """Predicted seconds of one node of a rewritten program, each time that it runs."""

    forward: float = 0.0
    backward: float = 0.0
    summed: float = 0.0  # once a step: its part in summing the gradients of parameters

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.summed

    def __add__(self, other: NodeCost) -> NodeCost:
        return NodeCost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.summed + other.summed,
        )


class NodePrices:
    """The one price of every node of a rewritten program, from what the node itself carries."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.mesh, self.device = mesh, cluster.device
        self.price = ClusterPrice(cluster, mesh)
        self._known: dict[tuple[Facts, Strategy], NodeCost] = {}

    def __call__(self, node: fx.Node) -> NodeCost:
        if (movement := info(node).movement) is not None:
            return self._movement(node, movement)
        if info(node).sync:
            return self._summed(info(node).sync, info(node).type)
        return sum((self._call(*call) for call in info(node).calls), NodeCost())

    def _call(self, facts: Facts, strategy: Strategy) -> NodeCost:
        key = facts, strategy
        if key not in self._known:
            done = work(facts, ShardSizes(facts.rule, [strategy], self.mesh))
            forward, backward = seconds(facts, done, self.device)
            self._known[key] = NodeCost(float(forward[0]), float(backward[0]))
        return self._known[key]

    def _movement(self, node: fx.Node, movement: Movement) -> NodeCost:
        (value,) = node.all_input_nodes
        before: TensorType = info(value).type
        if movement.kind == "identity" and is_made_of_parameters(value):
            return self._summed(movement.axes, before)

        def both(differentiable: bool) -> float:
            size, mesh = before.dtype.itemsize, self.mesh
            about = before.layout, before.shape, size, mesh, self.price, differentiable
            return movement_cost(movement, *about)

        forward = both(False)
        return NodeCost(forward, both(info(node).differentiable) - forward)

    def _summed(self, axes: tuple[str, ...], type_: TensorType) -> NodeCost:
        return NodeCost(summed=float(self.price.bucketed(axes, type_.local_bytes(self.mesh))))


def program_cost(graph: fx.Graph, mesh: Mesh, cluster: Cluster) -> Cost:
    """The cost of one run of the rewritten `graph`: the sum of its nodes' prices."""
    prices = NodePrices(cluster, mesh)
    worked, moved = NodeCost(), NodeCost()
    for node in graph.nodes:
        if info(node).movement is not None:
            moved += prices(node)
        else:
            worked += prices(node)
    summed = worked.summed + moved.summed
    communication = moved.seconds + worked.summed
    return Cost(
        compute=worked.forward + worked.backward,
        communication=communication,
        exposed=communication - summed * cluster.device.overlap,
        forward=worked.forward,
        backward=worked.backward,
        gradient_sync=summed,
    )
