"""Counted: which bytes a search counts against a limit, before there are any layouts.

They are no more than the finished program holds at one time, so that nothing that fits is left out;
it has the last word on the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.capture.captured import Captured
from autopar.cost.saved_tensors import SavedTensors
from autopar.strategies.node_info import info
from autopar.strategies.registry import tensor_inputs
from autopar.strategies.results import tensors_of, values_of


@dataclass(frozen=True)
class Use:
    """One tensor input of one operator: the value, the operator, which of its inputs."""

    value: str
    reader: str
    position: int


def count_moments(
    captured: Captured,
    readings: Mapping[str, Collection[Use]],
    saved: SavedTensors,
    microbatches: int,
) -> tuple[bool, bool]:
    """Whether activations are counted, and whether the gradients of parameters: what is held when
    backward begins, or when it ends.

    Activations go while gradients come, but for micro-batches after the first, which find those of
    others. Both moments are within the limit in every plan that fits; the larger one tells more.
    """
    if microbatches > 1:
        return True, True
    kept = {value for value in readings if saved.is_kept(value)}
    kept |= {
        value.name
        for call in captured.operators
        for value in values_of(call)
        if saved.keeps_output(call.name)
    }
    nodes = {node.name: node for node in captured.graph.nodes}
    values = [nodes[name] for name in kept - set(captured.parameters)]
    learned = [nodes[name] for name in captured.parameters if info(nodes[name]).learns]
    activations = sum(bytes_of(node) * info(node).times for node in values)
    gradients = sum(bytes_of(node) * info(node).times for node in learned)
    return activations >= gradients, activations < gradients


def uses_of_input(captured: Captured, node: fx.Node) -> list[Use] | None:
    """The readings of an input or a constant, which is cut at once if all of them want the same
    piece. None: it is whole on every rank in any case, as what has a gradient, and buffers, which
    people change between steps."""
    if node.name in captured.buffers or info(node).differentiable:
        return None
    found = []
    for reader in node.users:
        if reader.op == "output" or captured.rules.get(reader.name) is None:
            return None
        for position, value in enumerate(tensor_inputs(reader)):
            found += [Use(node.name, reader.name, position)] if value is node else []
    return found


def bytes_of(node: fx.Node) -> int:
    """All bytes of what a node makes."""
    return sum(value.numel() * value.itemsize for value in tensors_of(node))
