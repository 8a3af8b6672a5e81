"""Unsharded work: the computing of a program's operators, uncut, on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import copied_parameter
from autopar.cluster import Device
from autopar.cost.operator_costs import (
    OperatorWork,
    ShardSizes,
    facts_of,
    operator_seconds,
    operator_work,
)
from autopar.mesh import Mesh
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from autopar.strategies.registry import tensor_inputs
from autopar.strategies.rule import Facts

# Of each kind of operator, and how many there are.
UnshardedWork = list[tuple[Facts, OperatorWork, int]]


def runs_each_microbatch(node: fx.Node) -> bool:
    """Return whether every micro-batch runs a call on the devices."""
    return info(node).learns and not info(node).on_host and copied_parameter(node) is None


def unsharded_work(captured: Captured, counted: Iterable[fx.Node]) -> UnshardedWork:
    """Return facts, work and number of each kind of operator among the `counted` nodes."""
    mesh, kinds = Mesh(x=1), dict[int, fx.Node]()
    counts = Counter[int]()
    for node in counted:
        # Of several results it is the call that is priced.
        if captured.priced.get(node.name) is not None:
            kinds.setdefault(captured.classes[node.name], node)
            counts[captured.classes[node.name]] += info(node).count
    work = []
    for kind, node in kinds.items():
        rule = captured.priced[node.name]
        assert rule is not None
        facts = facts_of(node, rule, tensor_inputs(node))
        sizes = ShardSizes(rule, [Strategy()], mesh)
        work.append((facts, operator_work(facts, sizes), counts[kind]))
    return work


def spread_seconds(whole: UnshardedWork, pieces: int, device: Device) -> tuple[float, float]:
    """Return the seconds forward and backward of all work, spread over `pieces` devices."""
    forward = backward = 0.0
    for facts, done, count in whole:
        part = OperatorWork(*(figure / pieces for figure in done))
        once = operator_seconds(facts, part, device)
        forward += count * float(once[0][0])
        backward += count * float(once[1][0])
    return forward, backward


def model_flops(captured: Captured) -> float:
    """Return the FLOPs of a step's products, forward and backward, without recomputation."""
    return sum(
        count * float(done.flops[0] + done.backward_flops[0])
        for facts, done, count in unsharded_work(captured, captured.operators)
        if facts.rule.product
    )
