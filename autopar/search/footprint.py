"""Footprint: the predicted bytes of one device, part by part, from the finished program.

What forward keeps for backward is counted as autograd keeps it: a tensor that several operators
keep counts once, and a view is the tensor it looks at.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import fx

from autopar.capture.captured import Captured
from autopar.mesh import Mesh
from autopar.search.build import OPTIMIZER_COPIES
from autopar.search.keeping import Storage, kept_by


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


def program_memory(captured: Captured, graph: fx.Graph, mesh: Mesh) -> Memory:
    """The bytes that one rank of the rewritten `graph` holds."""
    parameters = learning = buffers = inputs = 0.0
    kept: dict[Storage, float] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            size = float(node.meta["type"].local_bytes(mesh))
            if node.name in captured.parameters:
                parameters += size
                learning += size * node.meta["differentiable"]
            elif node.name in captured.buffers:
                buffers += size
            else:
                inputs += size
        kept |= kept_by(node, mesh)
    return Memory(
        parameters=parameters,
        gradients=learning,
        optimizer=OPTIMIZER_COPIES * learning,
        buffers=buffers,
        activations=sum(kept.values()),
        inputs=inputs,
    )
