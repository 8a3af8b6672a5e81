"""Bytes that any possible stage keeps from forward to backward, and recomputes in backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

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
from autopar.program.equality import constants_of
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import is_result, values_of


def kept_by_stages(
    flow: Flow, known: SavedBytesCache, halves: WeightHalfBytes
) -> tuple[Spans, Spans]:
    """Return the bytes kept of one micro-batch until backward, received values not among them.

    The second value is of the bytes kept from the gradients of inputs to those of weights.
    """
    keepers: dict[Storage, set[int]] = {}  # the positions of its readers
    late_keepers: dict[Storage, set[int]] = {}
    sizes: dict[Storage, float] = {}
    deferred = {flow.position[node] for node in flow.weight_inputs}
    for node, positions in flow.read_at.items():
        saved = known.through(node)
        sizes |= saved
        for key in saved:
            keepers.setdefault(key, set()).update(positions)
        for key, size in halves(node).items():
            late_keepers.setdefault(key, set()).update(deferred.intersection(positions))
            sizes[key] = max(size, sizes.get(key, 0.0))
    activations, weight_halves = Spans(), Spans()
    for key, readers in keepers.items():
        maker = flow.position.get(key[0])
        if maker is not None:  # a later stage has received it
            activations.all_of((maker, min(readers)), sizes[key])
        else:
            activations.any_of(readers, sizes[key])
    for key, readers in late_keepers.items():
        weight_halves.any_of(readers, sizes[key])
    return activations, weight_halves


class WeightHalfBytes:
    """Find the tensors from which an operator's deferred weight gradients are computed."""

    def __init__(self, flow: Flow, known: SavedBytesCache) -> None:
        self._flow, self._known = flow, known
        self._calls = CallMemories(known.mesh)
        self._cache: dict[fx.Node, SavedBytes] = {}
        self._hands_on_cache: dict[Hashable, bool] = {}  # by call and input

    def __call__(self, node: fx.Node) -> SavedBytes:
        if node not in self._cache:
            self._cache[node] = self._tensors_of(node)
        return self._cache[node]

    def _tensors_of(self, node: fx.Node) -> SavedBytes:
        weights, region = self._flow.weight_inputs.get(node), info(node).region
        if weights is None:
            if not self._flow.is_weight(node):
                return {}
            # Values of weights alone are recomputed with the gradients of these.
            is_late = region is not None and not region.is_full
            return self._known.through(node) if is_late else self._known.own(node)
        sizes = dict(self._known.own(node)) if weights.product else {}
        waiting = values_of(node) if weights.product else self._flow.weights_of(node)
        for value in [value for value in waiting if info(value).differentiable]:
            # One gradient may be that of several values, which wait together.
            owner = self._gradient_owner(value) if weights.product else value
            size = min(local_bytes(v, self._known.mesh) for v in (value, owner))
            key = owner, "gradient" if weights.product else f"gradient of {node.name}"
            sizes[key] = max(size, sizes.get(key, 0.0))
        return sizes

    def _gradient_owner(self, value: fx.Node) -> fx.Node:
        """Return the value that shares its gradient: sums and views hand theirs on unchanged."""
        while len(readers := [user for user in value.users if info(user).differentiable]) == 1:
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
        call = constants_of(reader)
        types = (*((info(node).type, info(node).differentiable) for node in inputs),)
        key = reader.target, call, types, inputs.index(value)
        if key not in self._hands_on_cache:
            memory = self._calls(reader)
            size = dict(zip(memory.inputs, memory.gradients)).get(value)
            self._hands_on_cache[key] = size == HANDED_ON
        return self._hands_on_cache[key]


class RegionSpan(NamedTuple):
    """The first and last position of a region, and the most bytes that it recomputes."""

    first: int
    last: int
    size: float


class RecomputedBytes:
    """Estimate the bytes that stages of a program recompute in backward."""

    def __init__(self, flow: Flow, known: SavedBytesCache, halves: WeightHalfBytes) -> None:
        self.flow, self._known, self._halves = flow, known, halves
        inside: dict[RecomputeRegion, list[fx.Node]] = {}
        for node in flow.graph.nodes:
            region = info(node).region
            if region is not None and node in flow.read_at:
                inside.setdefault(region, []).append(node)
        self.regions = [
            RegionSpan(*ends, region.size)
            for region in map(self._span, inside.values())
            for ends in flow.place_map.spans(region.first, region.last)
        ]
        self._cache: dict[tuple[int, int, bool], float] = {}

    def _span(self, nodes: Sequence[fx.Node]) -> RegionSpan:
        positions = [position for node in nodes for position in self.flow.read_at[node]]
        sizes: dict[Storage, float] = {}
        for node in nodes:
            for held in (self._known.own, self._known.through, self._known.remade):
                sizes |= held(node)
        return RegionSpan(min(positions), max(positions), sum(sizes.values()))

    def bytes(self, start: int, end: int, *, is_split: bool = False) -> float:
        """Return the bytes that a stage keeps beyond forward's in the backward of one micro-batch.

        If backward is split, regions leave behind what their weight gradients need.
        """
        if not self.regions:
            return 0.0
        start, end, _ = self.flow.place_map.stage(start, end)
        key = start, end, is_split
        if key not in self._cache:
            stage, known = self.flow.made_in(start, end), self._known
            stays = [self._halves] if is_split else []
            self._cache[key] = peak_recomputed_bytes(stage, known.mesh, known, *stays)
        return self._cache[key]
