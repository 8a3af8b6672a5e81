"""Kept: what every stage that there could be keeps from forward to backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import fx

from autopar.cost.saved_tensors import (
    SavedBytes,
    SavedBytesCache,
    Storage,
    local_bytes,
    peak_recomputed_bytes,
)
from autopar.passes.flow import Flow
from autopar.pipeline.memory.call_memory import HANDED_ON, CallMemories
from autopar.pipeline.stages.spans import Spans
from autopar.pipeline.stages.stretch import Stretch
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import is_result, values_of


def kept_by_stages(flow: Flow, known: SavedBytesCache, halves: Halves) -> tuple[Spans, Spans]:
    """What stages keep of one micro-batch from forward to backward, besides what they received.

    Then what they keep from the gradients of their inputs to those of their weights.
    """
    keepers: dict[Storage, set[int]] = {}  # where it is read
    later: dict[Storage, set[int]] = {}
    sizes: dict[Storage, float] = {}
    put_off = {flow.position[node] for node in flow.weight_inputs}
    for node, positions in flow.read_at.items():
        kept = known.through(node)
        sizes |= kept
        for key in kept:
            keepers.setdefault(key, set()).update(positions)
        for key, size in halves(node).items():
            later.setdefault(key, set()).update(put_off.intersection(positions))
            sizes[key] = max(size, sizes.get(key, 0.0))
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


class Halves:
    """Of an operator, what the gradients of weights are made of, where they are put off."""

    def __init__(self, flow: Flow, known: SavedBytesCache) -> None:
        self._flow, self._known = flow, known
        self._calls = CallMemories(known.mesh)
        self._found: dict[fx.Node, SavedBytes] = {}
        self._handed_on: dict[Hashable, bool] = {}  # by call and input

    def __call__(self, node: fx.Node) -> SavedBytes:
        if node not in self._found:
            self._found[node] = self._of(node)
        return self._found[node]

    def _of(self, node: fx.Node) -> SavedBytes:
        weights, region = self._flow.weight_inputs.get(node), info(node).region
        if weights is None:
            if not self._flow.is_weight(node):
                return {}
            # What is made of weights alone is made again with their gradients.
            is_late = region is not None and not region.is_full
            return self._known.through(node) if is_late else self._known.own(node)
        found = dict(self._known.own(node)) if weights.product else {}
        waiting = values_of(node) if weights.product else self._flow.weights_of(node)
        for value in [value for value in waiting if info(value).differentiable]:
            # One gradient may be that of several values, which wait together.
            same = self._with_same_gradient(value) if weights.product else value
            size = min(local_bytes(one, self._known.mesh) for one in (value, same))
            key = same, "gradient" if weights.product else f"gradient of {node.name}"
            found[key] = max(size, found.get(key, 0.0))
        return found

    def _with_same_gradient(self, value: fx.Node) -> fx.Node:
        """The value whose gradient is its own: sums and views hand theirs on as it is."""
        while len(readers := [one for one in value.users if info(one).differentiable]) == 1:
            if not self._hands_on(readers[0], value):
                break
            value = readers[0]
        return value

    def _hands_on(self, reader: fx.Node, value: fx.Node) -> bool:
        if reader.op != "call_function" or is_result(reader) or values_of(reader) != [reader]:
            return False
        if (movement := info(reader).movement) is not None:
            return movement.hands_back
        inputs = reader.all_input_nodes
        names = {one: f"%{place}" for place, one in enumerate(inputs)}
        call = str(fx.map_arg((reader.args, reader.kwargs), names.__getitem__))
        types = (*((info(one).type, info(one).differentiable) for one in inputs),)
        key = reader.target, call, types, names[value]
        if key not in self._handed_on:
            seen = self._calls(reader)
            found = dict(zip(seen.inputs, seen.gradients)).get(value)
            self._handed_on[key] = found == HANDED_ON
        return self._handed_on[key]


class Remade:
    """What stages of a program make again in backward."""

    def __init__(
        self, flow: Flow, known: SavedBytesCache, halves: Halves, stretch: Stretch
    ) -> None:
        self.flow, self._known, self._halves, self._stretch = flow, known, halves, stretch
        inside: dict[RecomputeRegion, list[fx.Node]] = {}
        for node in flow.graph.nodes:
            region = info(node).region
            if region is not None and node in flow.read_at:
                inside.setdefault(region, []).append(node)
        # Of each region the first and the last position, and what it makes again at most.
        spans = [self._span(nodes) for nodes in inside.values()]
        self.regions = [(*at, size) for *ends, size in spans for at in stretch.span(*ends)]
        self._found: dict[tuple[int, int, bool], float] = {}

    def _span(self, nodes: Sequence[fx.Node]) -> tuple[int, int, float]:
        at = [position for node in nodes for position in self.flow.read_at[node]]
        sizes: dict[Storage, float] = {}
        for node in nodes:
            for held in (self._known.own, self._known.through, self._known.remade):
                sizes |= held(node)
        return min(at), max(at), sum(sizes.values())

    def bytes(self, start: int, end: int, is_split: bool = False) -> float:
        """The bytes by which a stage comes to keep more in the backward of one micro-batch; where
        that is split, what gradients of weights are made of stays as regions go."""
        if not self.regions:
            return 0.0
        start, end, _ = self._stretch.stage(start, end)
        about = start, end, is_split
        if about not in self._found:
            stage, known = self.flow.made_in(start, end), self._known
            stays = [self._halves] if is_split else []
            self._found[about] = peak_recomputed_bytes(stage, known.mesh, known, *stays)
        return self._found[about]
