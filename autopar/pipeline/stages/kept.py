"""Kept: what every stage that there could be keeps from forward to backward."""

from __future__ import annotations

from torch import fx

from autopar.cost.saved_tensors import (
    Storage,
    kept_by,
    kept_through,
    local_bytes,
    most_remade,
    remade_for,
)
from autopar.mesh import Mesh
from autopar.passes.flow import Flow
from autopar.pipeline.stages.spans import Spans
from autopar.strategies.node_info import Region, info
from autopar.strategies.results import values_of


def kept_by_stages(flow: Flow, mesh: Mesh) -> tuple[Spans, Spans]:
    """What stages keep of one micro-batch from forward to backward, besides what they received.

    Then what they keep from the gradients of their inputs to those of their weights.
    """
    keepers: dict[Storage, set[int]] = {}  # where it is read
    later: dict[Storage, set[int]] = {}
    sizes: dict[Storage, float] = {}
    put_off = {flow.position[node] for node in flow.weight_inputs}
    for node, positions in flow.read_at.items():
        own, weights = kept_by(node, mesh), flow.weight_inputs.get(node)
        kept = kept_through(node, mesh)
        sizes |= kept | own
        waits = weights.product if weights is not None else flow.is_weight(node)
        for key in kept:
            keepers.setdefault(key, set()).update(positions)
        for key in own if waits else ():
            later.setdefault(key, set()).update(put_off.intersection(positions))
        if weights is not None:
            waiting = values_of(node) if weights.product else flow.weights_of(node)
            for value in [value for value in waiting if info(value).differentiable]:
                key = value, f"gradient of {node.name}"
                later[key], sizes[key] = set(positions), local_bytes(value, mesh)
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


def regions_of(flow: Flow, mesh: Mesh) -> list[tuple[int, int, float]]:
    """Of each region that is recomputed the first and the last position, and what it makes again
    at most."""
    inside: dict[Region, list[fx.Node]] = {}
    for node in flow.graph.nodes:
        region = info(node).region
        if region is not None and node in flow.read_at:
            inside.setdefault(region, []).append(node)
    found = []
    for nodes in inside.values():
        at = [position for node in nodes for position in flow.read_at[node]]
        sizes = {
            key: size
            for node in nodes
            for held in (kept_by, kept_through, remade_for)
            for key, size in held(node, mesh).items()
        }
        found.append((min(at), max(at), sum(sizes.values())))
    return found


def remade_in(flow: Flow, mesh: Mesh, start: int, end: int) -> float:
    """The bytes by which a stage comes to keep more in the backward of one micro-batch."""
    if not any(info(node).region for node in flow.graph.nodes):
        return 0.0
    stage = [node for node, at in flow.read_at.items() if any(start <= p < end for p in at)]
    order = {node: index for index, node in enumerate(flow.graph.nodes)}
    return most_remade(sorted(stage, key=order.__getitem__), mesh)
