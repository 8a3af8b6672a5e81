"""Whole work: what the operators of a program compute, uncut, on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from autopar.capture.captured import Captured
from autopar.cost.operators import ShardSizes, Work, facts_of, work
from autopar.mesh import Mesh
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from autopar.strategies.registry import tensor_inputs
from autopar.strategies.rule import Facts


def whole_work(captured: Captured, counted: Iterable[fx.Node]) -> list[tuple[Facts, Work, int]]:
    """Of each kind of operator among those that are `counted`, and how many there are of it."""
    mesh, kinds = Mesh(x=1), dict[int, fx.Node]()
    counts = Counter[int]()
    for node in counted:
        if captured.priced[node.name] is not None:
            kinds.setdefault(captured.classes[node.name], node)
            counts[captured.classes[node.name]] += info(node).times
    found = []
    for kind, node in kinds.items():
        rule = captured.priced[node.name]
        assert rule is not None
        facts = facts_of(node, rule, tensor_inputs(node))
        found.append((facts, work(facts, ShardSizes(rule, [Strategy()], mesh)), counts[kind]))
    return found


def model_flops(captured: Captured) -> float:
    """FLOPs of the products of a step, forward and backward, each once: no recomputation."""
    return sum(
        count * float(done.flops[0] + done.backward_flops[0])
        for facts, done, count in whole_work(captured, captured.operators)
        if facts.rule.product
    )
