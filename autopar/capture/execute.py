"""Execute: run a captured graph as it stands, on one device. The reference for everything else.

>>> outputs, new_buffers = run(captured, parameters_by_name, buffers_by_name, args, kwargs)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.marker import ANNOTATE


def run(
    captured: Captured,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """The model's outputs, in the user's structure, and the new values of mutated buffers."""
    flat = pytree.tree_leaves((args, dict(kwargs or {})))
    given = {name: value for name, value in zip(captured.inputs, flat) if name is not None}
    values: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(captured, node.name, parameters, buffers, given)
        elif node.op == "output":
            results = fx.map_arg(node.args[0], values.__getitem__)
            return _outputs(captured, list(results))
        elif node.target is ANNOTATE:
            values[node] = values[node.args[0]]
        else:
            call_args, call_kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*call_args, **call_kwargs)
    raise AssertionError("a graph ends with its output")


def _placeholder(
    captured: Captured,
    name: str,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
) -> Tensor:
    if name in captured.parameters:
        return parameters[captured.parameters[name]]
    if name in captured.buffers:
        return buffers[captured.buffers[name]]
    return captured.constants[name] if name in captured.constants else given[name]


def _outputs(captured: Captured, results: list[Tensor]) -> tuple[Any, dict[str, Tensor]]:
    count = len(results) - len(captured.mutations)
    tensors = iter(results[:count])
    leaves = [
        next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in captured.output_leaves
    ]
    mutated = {
        name: value.detach().clone() for name, value in zip(captured.mutations, results[count:])
    }
    return pytree.tree_unflatten(leaves, captured.output_spec), mutated
