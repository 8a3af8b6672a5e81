"""Kept: what every stage that there could be keeps from forward to backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.cost.saved_tensors import KeptOnce, Storage, local_bytes, most_remade
from autopar.passes.flow import Flow
from autopar.pipeline.stages.spans import Spans
from autopar.strategies.node_info import Region, info
from autopar.strategies.results import values_of


def kept_by_stages(flow: Flow, known: KeptOnce) -> tuple[Spans, Spans]:
    """What stages keep of one micro-batch from forward to backward, besides what they received.

    Then what they keep from the gradients of their inputs to those of their weights.
    """
    keepers: dict[Storage, set[int]] = {}  # where it is read
    later: dict[Storage, set[int]] = {}
    sizes: dict[Storage, float] = {}
    put_off = {flow.position[node] for node in flow.weight_inputs}
    for node, positions in flow.read_at.items():
        own, weights = known.own(node), flow.weight_inputs.get(node)
        kept = known.through(node)
        sizes |= kept
        sizes |= own
        waits = weights.product if weights is not None else flow.is_weight(node)
        for key in kept:
            keepers.setdefault(key, set()).update(positions)
        for key in own if waits else ():
            later.setdefault(key, set()).update(put_off.intersection(positions))
        if weights is not None:
            waiting = values_of(node) if weights.product else flow.weights_of(node)
            for value in [value for value in waiting if info(value).differentiable]:
                key = value, f"gradient of {node.name}"
                later[key], sizes[key] = set(positions), local_bytes(value, known.mesh)
    whole, weight_halves = Spans(), Spans()
    for key, readers in keepers.items():
        made = flow.position.get(key[0])
        if made is not None:  # a stage after that received it
            whole.all_of((made, min(readers)), sizes[key])
        else:
            whole.any_of(readers, sizes[key])
    for key, readers in later.items():
        weight_halves.any_of(readers, sizes[key])
    return whole, weight_halves


class Remade:
    """What stages of a program make again in backward."""

    def __init__(self, flow: Flow, known: KeptOnce) -> None:
        self.flow, self._known = flow, known
        inside: dict[Region, list[fx.Node]] = {}
        for node in flow.graph.nodes:
            region = info(node).region
            if region is not None and node in flow.read_at:
                inside.setdefault(region, []).append(node)
        # Of each region the first and the last position, and what it makes again at most.
        self.regions = [self._span(nodes) for nodes in inside.values()]
        self._found: dict[tuple[int, int], float] = {}

    def _span(self, nodes: Sequence[fx.Node]) -> tuple[int, int, float]:
        at = [position for node in nodes for position in self.flow.read_at[node]]
        sizes: dict[Storage, float] = {}
        for node in nodes:
            for held in (self._known.own, self._known.through, self._known.remade):
                sizes |= held(node)
        return min(at), max(at), sum(sizes.values())

    def bytes(self, start: int, end: int) -> float:
        """The bytes by which a stage comes to keep more in the backward of one micro-batch."""
        if not self.regions:
            return 0.0
        if (start, end) not in self._found:
            stage = self.flow.made_in(start, end)
            self._found[start, end] = most_remade(stage, self._known.mesh, self._known)
        return self._found[start, end]
