"""Joint kernels: what the messages inside a call take, and how much of that computing hides."""

from __future__ import annotations

from typing import NamedTuple

from autopar.collectives.together import JointKernel, Traffic
from autopar.cost.operators import ShardSizes
from autopar.cost.price import ClusterPrice
from autopar.cost.state_price import NodeCost, StatePrice
from autopar.mesh import Mesh
from autopar.strategies import KERNELS, Strategy
from autopar.strategies.rule import Facts, Rule
from autopar.strategies.strategy import Joint, Reads


class Computed(NamedTuple):
    """Seconds that a rank computes of a call."""

    forward: float
    backward: float


class Inside(NamedTuple):
    """What a rank moves inside a call that it carries out with others."""

    kernel: JointKernel
    axes: tuple[str, ...]
    traffic: Traffic


def traffic_of(facts: Facts, strategy: Strategy, mesh: Mesh) -> Inside | None:
    """What is moved inside a call; None of one that each rank carries out by itself."""
    found = facts.rule.kernel(strategy)
    kernel = KERNELS[found[1]].joint if found is not None else None
    if found is None or kernel is None:
        return None
    axes = strategy.by_factor[found[0]]
    count = mesh.degree(axes)
    pieces = ShardSizes(facts.rule, [strategy], mesh)
    inputs = [float(size[0]) for size in pieces.inputs(facts)]
    outputs = [float(size[0]) for size in pieces.outputs(facts)]
    joint = facts.rule.joints.get(found[0])
    if joint is not None and joint.beside is not None:
        inputs[0] *= _rows_beside(facts.rule, joint, strategy, found[0], mesh)
    sizes = {factor: facts.rule.sizes.get(factor, 1) for factor in kernel.told}
    is_crossed = joint is not None and not strategy.by_factor.keys().isdisjoint(joint.factors)
    traffic = (kernel.crossed if is_crossed else None) or kernel.traffic
    return Inside(kernel, axes, traffic(count, inputs, outputs, facts.differentiable, **sizes))


def _rows_beside(rule: Rule, joint: Joint, strategy: Strategy, name: str, mesh: Mesh) -> float:
    """The rows of the first input that travel, of each of the largest piece."""
    members = mesh.groups(strategy.by_factor[name])[0]
    pieces = rule.pieces(name, strategy, mesh, members)
    before = pieces[joint.inputs[0] or ""]
    rows = joint.beside
    if isinstance(rows, Reads):
        rows = rows.moved(before, pieces[joint.outputs[0] or ""])
    return (rows or 0) / max(length for _, length in before)


def messages_inside(
    facts: Facts, strategy: Strategy, price: ClusterPrice, overlap: float, computed: Computed
) -> NodeCost:
    """The movements inside a call that ranks carry out together; nothing of another one."""
    found = traffic_of(facts, strategy, price.mesh)
    if found is None:
        return NodeCost()
    kernel, axes, traffic = found
    ways = [(traffic.forward, traffic.starts[0], computed.forward)]
    if any(facts.differentiable):
        ways.append((traffic.backward, traffic.starts[1], computed.backward))
    device = price.cluster.device
    start = device.overhead + device.half(facts.dtype) / device.peak(facts.dtype)
    shown, hidden = [0.0, 0.0], 0.0
    for way, (moved, starts, beside) in enumerate(ways):
        seconds = sum(float(price.seconds(kind, axes, size)) for kind, size in moved)
        behind = StatePrice(price, overlap).hidden(seconds, beside) if kernel.is_hidden else 0.0
        shown[way] = seconds - float(behind) + starts * start
        hidden += float(behind)
    return NodeCost(shown[0], shown[1], hidden)
