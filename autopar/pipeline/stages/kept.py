"""Kept: what every stage that there could be keeps from forward to backward."""

from __future__ import annotations

from autopar.cost.saved_tensors import Storage, kept_by, local_bytes
from autopar.mesh import Mesh
from autopar.passes.flow import Flow
from autopar.pipeline.stages.spans import Spans
from autopar.strategies.node_info import info
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
        kept, weights = kept_by(node, mesh), flow.weight_inputs.get(node)
        sizes |= kept
        waits = weights.product if weights is not None else flow.is_weight(node)
        for key in kept:
            keepers.setdefault(key, set()).update(positions)
            if waits:
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
