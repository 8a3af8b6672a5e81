"""Execute: run a captured graph as it stands, on one device. The reference for everything else.

>>> outputs, new_buffers = run(captured, parameters_by_name, buffers_by_name, args, kwargs)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.containers import fill, filled
from autopar.capture.marker import ANNOTATE
from autopar.capture.writes import carry_out, put_between


def run(
    captured: Captured,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    change: Callable[[fx.Node, Any], Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """The model's outputs, in the user's structure, and the new values of mutated buffers.

    `change` is shown every value as it is made, and gives this or another in its place.
    """
    call = args, dict(kwargs or {})
    named = zip(captured.inputs, pytree.tree_leaves(call))
    given = {name: value for name, value in named if name is not None}
    left = filled(captured.contents, call, given)
    given |= carry_out(captured.writes, given)
    fill(left)
    for name, bounds in captured.bounds.items():
        put_between(bounds, parameters[name])
    given |= {key: parameters[name] for key, name in captured.parameters.items()}
    given |= {key: buffers[name] for key, name in captured.buffers.items()}
    device = next((value.device for value in given.values()), None)
    held = {**captured.constants, **captured.draw(device), **given}
    return _outputs(captured, evaluate(captured.graph, held, change))


def evaluate(
    graph: fx.Graph,
    given: Mapping[str, Tensor],
    change: Callable[[fx.Node, Any], Any] | None = None,
) -> Any:
    """All results, as the output of a graph holds them, from tensors by placeholder."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
        elif node.target is ANNOTATE:
            values[node] = values[node.args[0]]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        if change is not None:
            values[node] = change(node, values[node])
    raise AssertionError("a graph ends with its output")


def _outputs(captured: Captured, results: Sequence[Tensor]) -> tuple[Any, dict[str, Tensor]]:
    count = len(results) - len(captured.mutations)
    tensors = iter(results[:count])
    leaves = [
        next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in captured.output_leaves
    ]
    mutated = {
        name: value.detach().clone() for name, value in zip(captured.mutations, results[count:])
    }
    return pytree.tree_unflatten(leaves, captured.output_spec), mutated
