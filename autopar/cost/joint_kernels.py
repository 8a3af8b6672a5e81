"""Joint kernels: seconds of the messages inside a call, the part that computing hides, and the cost
of computing in pieces."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from autopar.collectives.joint_kernels import CommVolume, JointKernel
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.collective import Collective, When
from autopar.cost.operator_costs import ShardSizes, operator_work, rooflines
from autopar.cost.state_price import NodeCost, StatePrice
from autopar.mesh import Mesh
from autopar.strategies import KernelCall, Strategy
from autopar.strategies.rule import Facts
from autopar.strategies.strategy import InputWindow


class ComputeSeconds(NamedTuple):
    """Seconds that a rank computes of a call."""

    forward: float
    backward: float


class JointCall(NamedTuple):
    """A joint kernel with its axes, and the communication of a rank in one call."""

    kernel: JointKernel
    axes: tuple[str, ...]
    traffic: CommVolume


def price_joint_call(facts: Facts, strategy: Strategy, mesh: Mesh) -> JointCall | None:
    """Return the joint kernel that a strategy uses, with its communication; None where each rank
    computes by itself."""
    kernel_call = KernelCall.of(facts.rule, strategy)
    if kernel_call is None or (kernel := kernel_call.kernel.joint) is None:
        return None
    count = mesh.degree(kernel_call.axes)
    pieces = ShardSizes(facts.rule, [strategy], mesh)
    inputs = [float(size[0]) for size in pieces.inputs(facts)]
    outputs = [float(size[0]) for size in pieces.outputs(facts)]
    joint = facts.rule.joints.get(kernel_call.name)
    if joint is not None and joint.travelling_rows is not None:
        inputs[0] *= _moved_share(kernel_call, joint.travelling_rows, mesh)
        if isinstance(joint.travelling_rows, int):
            outputs[0] *= joint.travelling_rows / max(kernel_call.group(mesh, 0).output().lengths)
    if kernel.is_wide:
        outputs[0] *= max(4 / facts.dtype.itemsize, 1)
    known = {**facts.rule.sizes, "itemsize": facts.dtype.itemsize}
    sizes = {factor: known.get(factor, 1) for factor in kernel.told}
    is_crossed = joint is not None and not strategy.by_factor.keys().isdisjoint(joint.factors)
    traffic = (kernel.crossed if is_crossed else None) or kernel.traffic
    return JointCall(
        kernel, kernel_call.axes, traffic(count, inputs, outputs, facts.differentiable, **sizes)
    )


def joint_collectives(facts: Facts, strategy: Strategy, mesh: Mesh) -> list[Collective]:
    """Return the collectives inside a call, forward and, where a gradient flows, backward."""
    if (call := price_joint_call(facts, strategy, mesh)) is None:
        return []
    kernel, axes, traffic = call
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


def _moved_share(call: KernelCall, window: int | InputWindow, mesh: Mesh) -> float:
    """Return the rows of the first input that move, relative to its largest piece."""
    group = call.group(mesh, 0)
    before = group.input(0)
    if isinstance(window, InputWindow):
        window = window.moved(before.pieces, group.output().pieces)
    return window / max(before.lengths)


def joint_message_cost(
    facts: Facts, strategy: Strategy, price: ClusterPrice, overlap: float, computed: ComputeSeconds
) -> NodeCost:
    """Return the seconds that a joint kernel adds to its computing: messages that computing does
    not hide, and computing in pieces. Zero for any other call."""
    call = price_joint_call(facts, strategy, price.mesh)
    if call is None:
        return NodeCost()
    kernel, axes, traffic = call
    ways = (traffic.forward, traffic.backward)[: 1 + any(facts.differentiable)]
    in_pieces = _extra_compute_seconds(facts, strategy, price, traffic, price.mesh.degree(axes))
    shown, hidden = [0.0, 0.0], 0.0
    for direction, (moved, more) in enumerate(zip(ways, in_pieces)):
        repeated = Counter(moved)  # many steps of a ring move as much
        seconds = sum(n * float(price.seconds(kind, axes, b)) for (kind, b), n in repeated.items())
        computing = computed[direction] + more
        hidden_seconds = (
            StatePrice(price, overlap).hidden(seconds, computing) if kernel.is_hidden else 0.0
        )
        shown[direction] = seconds - float(hidden_seconds) + more
        hidden += float(hidden_seconds)
    return NodeCost(shown[0], shown[1], hidden)


def _extra_compute_seconds(
    facts: Facts, strategy: Strategy, price: ClusterPrice, traffic: CommVolume, count: int
) -> list[float]:
    """Return the seconds by which computing in pieces takes longer, forward and backward."""
    device = price.cluster.device
    start = device.overhead + device.half(facts.dtype) / device.peak(facts.dtype)
    if traffic.further is None or not device.far_seconds:  # what is read comes beside arithmetic
        return [starts * start for starts in traffic.starts]
    done = operator_work(facts, ShardSizes(facts.rule, [strategy], price.mesh))
    seconds = []
    lines = rooflines(facts, done, device).values()
    for (formula, values), starts, further in zip(lines, traffic.starts, traffic.further):
        # Caches hold as much for all pieces as for one: the rows of each are others.
        piece = {symbol: values[symbol] / count for symbol in "FMNSQ"}
        piece["M"] += further.read * (1 - 1 / count)
        piece["N"] += further.written * (1 - 1 / count)
        more = count * formula(**values | piece) - formula(**values)
        seconds.append(more.item() + (starts - count + 1) * start)
    return seconds
