"""Footprint: the predicted bytes of one device, part by part, from the finished program.

What forward keeps for backward is counted as autograd keeps it: a tensor that several operators
keep counts once, and a view is the tensor it looks at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.saved_tensors import Storage, kept_by
from autopar.mesh import Mesh
from autopar.strategies.node_info import info

HELD = ("parameter", "buffer")
# What an optimizer keeps for each parameter besides it and its gradient: Adam's two moments.
OPTIMIZER_COPIES = 2
Held = tuple[int, int, int]  # bytes of parameters, of gradients, of buffers
Number = TypeVar("Number", int, NDArray)


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on the fullest device, at the end of forward."""

    parameters: float
    gradients: float
    optimizer: float  # two copies of what learns, as Adam keeps them
    buffers: float
    activations: float  # what forward keeps for backward
    inputs: float

    @property
    def peak(self) -> float:
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, float]:
        return {"peak": self.peak, **asdict(self)}


def program_memory(graph: fx.Graph, mesh: Mesh) -> Memory:
    """The bytes that one rank of the rewritten `graph` holds."""
    inputs, kept = 0.0, dict[Storage, float]()
    for node in graph.nodes:
        kept |= kept_by(node, mesh)
        if node.op == "placeholder" and info(node).origin[0] not in HELD:
            inputs += info(node).type.local_bytes(mesh)
    held = [held_bytes(node, mesh) for node in graph.nodes]
    return memory_of(held, sum(kept.values()), inputs)


def held_bytes(node: fx.Node, mesh: Mesh) -> Held:
    """Of a parameter or buffer on one rank; of anything else nothing."""
    kind = info(node).origin[0] if node.op == "placeholder" else None
    size = info(node).type.local_bytes(mesh) if kind in HELD else 0
    if kind == "buffer":
        return 0, 0, size
    return size, size if size and info(node).differentiable else 0, 0


def memory_of(held: Iterable[Held], activations: float, inputs: float = 0.0) -> Memory:
    """With what the optimizer keeps of all that is held."""
    parameters, gradients, buffers = map(float, np.sum([(0, 0, 0), *held], axis=0))
    optimizer = OPTIMIZER_COPIES * gradients
    return Memory(parameters, gradients, optimizer, buffers, activations, inputs)


def states(parameters: Number, gradients: Number, buffers: Number) -> Number:
    """Bytes that stay from step to step: of a stage, or of tables of them."""
    return parameters + (1 + OPTIMIZER_COPIES) * gradients + buffers
