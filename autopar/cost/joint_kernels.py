"""Joint kernels: what the messages inside a call take, and how much of that computing hides."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from autopar.collectives.together import JointKernel, Traffic
from autopar.cost.collective import Collective, When
from autopar.cost.operators import ShardSizes, rooflines, work
from autopar.cost.price import ClusterPrice
from autopar.cost.state_price import NodeCost, StatePrice
from autopar.mesh import Mesh
from autopar.strategies import KernelCall, Strategy
from autopar.strategies.rule import Facts
from autopar.strategies.strategy import Reads

WAYS = "forward", "backward"


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
    call = KernelCall.of(facts.rule, strategy)
    if call is None or (kernel := call.kernel.joint) is None:
        return None
    count = mesh.degree(call.axes)
    pieces = ShardSizes(facts.rule, [strategy], mesh)
    inputs = [float(size[0]) for size in pieces.inputs(facts)]
    outputs = [float(size[0]) for size in pieces.outputs(facts)]
    joint = facts.rule.joints.get(call.name)
    if joint is not None and joint.beside is not None:
        inputs[0] *= _rows_beside(call, joint.beside, mesh)
        if isinstance(joint.beside, int):
            outputs[0] *= joint.beside / max(call.group(mesh, 0).output().lengths)
    if kernel.is_wide:
        outputs[0] *= max(4 / facts.dtype.itemsize, 1)
    known = {**facts.rule.sizes, "itemsize": facts.dtype.itemsize}
    sizes = {factor: known.get(factor, 1) for factor in kernel.told}
    is_crossed = joint is not None and not strategy.by_factor.keys().isdisjoint(joint.factors)
    traffic = (kernel.crossed if is_crossed else None) or kernel.traffic
    return Inside(kernel, call.axes, traffic(count, inputs, outputs, facts.differentiable, **sizes))


def collectives_inside(facts: Facts, strategy: Strategy, mesh: Mesh) -> list[Collective]:
    """What is moved inside a call, forward and, where a gradient flows, backward."""
    if (found := traffic_of(facts, strategy, mesh)) is None:
        return []
    kernel, axes, traffic = found
    ways: list[tuple[When, str, tuple[tuple[str, Any], ...]]] = [
        ("forward", kernel.forward.__name__, traffic.forward)
    ]
    if any(facts.differentiable):
        ways.append(("backward", kernel.backward.__name__, traffic.backward))
    return [
        Collective(kind, axes, float(size), when, name)
        for when, name, moved in ways
        for kind, size in moved
    ]


def _rows_beside(call: KernelCall, beside: int | Reads, mesh: Mesh) -> float:
    """The rows of the first input that travel, of each of the largest piece."""
    group = call.group(mesh, 0)
    before = group.input(0)
    if isinstance(beside, Reads):
        beside = beside.moved(before.pieces, group.output().pieces)
    return beside / max(before.lengths)


def messages_inside(
    facts: Facts, strategy: Strategy, price: ClusterPrice, overlap: float, computed: Computed
) -> NodeCost:
    """The movements inside a call that ranks carry out together; nothing of another one."""
    found = traffic_of(facts, strategy, price.mesh)
    if found is None:
        return NodeCost()
    kernel, axes, traffic = found
    ways = [(traffic.forward, computed.forward)]
    if any(facts.differentiable):
        ways.append((traffic.backward, computed.backward))
    shown, hidden = [0.0, 0.0], 0.0
    for way, (moved, beside) in enumerate(ways):
        alike = Counter(moved)  # many steps of a ring move as much
        seconds = sum(n * float(price.seconds(kind, axes, b)) for (kind, b), n in alike.items())
        behind = StatePrice(price, overlap).hidden(seconds, beside) if kernel.is_hidden else 0.0
        shown[way] = seconds - float(behind) + _begun(facts, strategy, price, traffic, way)
        hidden += float(behind)
    return NodeCost(shown[0], shown[1], hidden)


def _begun(
    facts: Facts, strategy: Strategy, price: ClusterPrice, traffic: Traffic, way: int
) -> float:
    """Seconds of computing that begins several times, which it does not take in one."""
    device, starts = price.cluster.device, traffic.starts[way]
    start = device.overhead + device.half(facts.dtype) / device.peak(facts.dtype)
    if traffic.again is None:
        return starts * start
    count, read, written = traffic.again[way]
    done = work(facts, ShardSizes(facts.rule, [strategy], price.mesh))
    formula, values = rooflines(facts, done, device)[WAYS[way]]
    piece = {symbol: values[symbol] / count for symbol in ("F", "M", "N", "S")}
    piece["M"] += read * (1 - 1 / count)
    piece["N"] += written * (1 - 1 / count)
    more = count * formula(**values | piece) - formula(**values)
    return float(more.item()) + (starts - count + 1) * start
