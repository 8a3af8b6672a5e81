"""Counted bytes: what a search counts against a memory limit, before there are any layouts.

The count is never more than the finished program holds at one time, so that nothing that fits is
left out. The finished program has the last word on the rest.
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
    """Name one tensor input of one operator: the value, the operator, which of its inputs."""

    value: str
    reader: str
    position: int


def count_moments(
    captured: Captured,
    uses: Mapping[str, Collection[Use]],
    saved_tensors: SavedTensors,
    microbatches: int,
    *,
    other: bool = False,
) -> tuple[bool, bool]:
    """Return whether activations are counted, and whether the gradients of parameters are.

    Activations are held when backward begins, gradients when it ends; activations go while
    gradients come. With several micro-batches both are held at once. Both moments are within the
    limit in every plan that fits; the one is counted that is larger as long as nothing is cut, or
    the other."""
    if microbatches > 1:
        return True, True
    kept_values = {value for value in uses if saved_tensors.is_kept(value)}
    kept_values |= {
        value.name
        for call in captured.operators
        for value in values_of(call)
        if saved_tensors.keeps_output(call.name)
    }
    nodes = {node.name: node for node in captured.graph.nodes}
    values = [nodes[name] for name in kept_values - set(captured.parameters)]
    learned_parameters = [nodes[name] for name in captured.parameters if info(nodes[name]).learns]
    activations = sum(bytes_of(node) * info(node).count for node in values)
    gradients = sum(bytes_of(node) * info(node).count for node in learned_parameters)
    counts_activations = (activations >= gradients) != other
    return counts_activations, not counts_activations


def uses_of_input(captured: Captured, node: fx.Node) -> list[Use] | None:
    """Return the uses of an input or a constant that is cut at once if all want the same piece.
    `None` if it is whole on every rank in any case: with a gradient, or as a buffer, which people
    change between steps."""
    if node.name in captured.buffers or info(node).differentiable:
        return None
    uses = []
    for reader in node.users:
        if reader.op == "output" or captured.rules.get(reader.name) is None:
            return None
        for position, value in enumerate(tensor_inputs(reader)):
            uses += [Use(node.name, reader.name, position)] if value is node else []
    return uses


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of everything that a node gives."""
    return sum(value.numel() * value.itemsize for value in tensors_of(node))
