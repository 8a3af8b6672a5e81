"""Footprint: the predicted bytes of one device, part by part, from the finished program.

What forward keeps for backward is counted as autograd keeps it: a tensor that several operators
keep counts once, and a view is the tensor it looks at.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import fx

from autopar.capture.captured import Captured
from autopar.cost.operators import Pieces
from autopar.mesh import Mesh
from autopar.search.build import OPTIMIZER_COPIES
from autopar.search.keeping import storage
from autopar.strategies.results import flat, maker, place_of, tensors_of


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
    parameters = learning = buffers = inputs = extra = 0.0
    kept: dict[tuple[fx.Node, int], float] = {}  # of each result of an operator
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
        elif node.op == "call_function" and node.meta["differentiable"]:
            read: list[fx.Node] = []
            fx.map_arg((node.args, node.kwargs), read.append)
            saved = [storage(read[i]) for i in node.meta.get("saved", ()) if i < len(read)]
            if node.meta.get("saves_output"):
                saved.append(storage(node))
            for value in saved:
                if value.op != "placeholder":
                    for place, type_ in enumerate(flat(value.meta["type"]), place_of(value)):
                        kept[maker(value), place] = float(type_.local_bytes(mesh))
            extra += _extra(node, mesh)
    return Memory(
        parameters=parameters,
        gradients=learning,
        optimizer=OPTIMIZER_COPIES * learning,
        buffers=buffers,
        activations=sum(kept.values()) + extra,
        inputs=inputs,
    )


def _extra(node: fx.Node, mesh: Mesh) -> float:
    """Tensors that an operator keeps besides its inputs and output."""
    rule, strategy = node.meta.get("rule"), node.meta.get("strategy")
    if rule is None or strategy is None or "start_of" in node.meta:  # a part keeps its inputs
        return 0.0
    pieces = Pieces(rule, [strategy], mesh)
    itemsize = tensors_of(node)[0].dtype.itemsize
    return sum(float(pieces.elements(dims)[0]) * itemsize for dims in rule.saved.extra)
