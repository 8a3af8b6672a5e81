"""Listing: a graph as text, one line a node, in the form that all reports and errors use.

p_up_weight = placeholder               : f32[4096@tp, 1024]       # sum of gradients over dp  up
identity = autopar.identity(norm)       : f32[8@dp, 128, 1024]     # 4096 bytes over tp, back: ...
linear = linear(identity, p_up_weight)  : f32[8@dp, 128, 4096@tp]  # layers.0.up  model.py:12

A movement says how many bytes of one rank it moves, over which axes, and how gradients move back.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

import torch
from torch import fx

from autopar.layout import Layout
from autopar.strategies import OperatorCall
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.registry import origin_of
from autopar.strategies.results import maker, tensors_of
from autopar.tensor_type import TensorType


def listing(graph: fx.Graph, origins: bool = True) -> str:
    """One line a node: `name = op(args)  : type  # movement  module  source`."""
    rows = [(_call(node), type_text(node), _remarks(node, origins)) for node in graph.nodes]
    left = min(max((len(call) for call, _, _ in rows), default=0), 72)
    middle = min(max((len(text) for _, text, _ in rows), default=0), 32)
    lines = []
    for call, text, remarks in rows:
        line = f"{call:<{left}}  : {text:<{middle}}" if text else call
        lines.append((f"{line}  # {remarks}" if remarks else line).rstrip())
    return "\n".join(lines)


def type_text(node: fx.Node) -> str:
    """The type of a node's value: with its layout where one is assigned."""
    if "type" in node.meta:
        found = flat_values(info(node).type)
    elif node.op == "output":
        return ""
    else:
        values = [v for v in info(node).values if isinstance(v, torch.Tensor)]
        found = tuple(TensorType.of(v, Layout.replicated(v.ndim)) for v in values)
    return ", ".join(map(str, found))


def operator_name(target: Callable[..., Any] | str) -> str:
    """`linear` for aten's, `autopar.all_gather` for others with a namespace."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def registered_as(target: Callable[..., Any] | str) -> str:
    """What a rule for it is registered for: a name, quoted, or a function."""
    if isinstance(target, torch._ops.OpOverload):
        if isinstance(origin := origin_of(target), type):
            return origin.__name__
        return f'"{target._schema.name.replace("::", ".")}"'
    return operator_name(target)


def rule_for(node: fx.Node) -> str:
    """The line that would let an operator be cut, if it does what its shapes allow."""
    call, operator = OperatorCall(node), registered_as(node.target)
    inputs, outputs = call.shapes, [tuple(output.shape) for output in tensors_of(node)]
    shapes = [*inputs, *outputs]
    gives_all = len(outputs) == len(call.outputs)  # of a backward some may be left out
    if gives_all and len({*shapes}) == 1:
        line = f"{', '.join(['...'] * len(inputs))} -> {', '.join(['...'] * len(outputs))}"
        return f'register_rule({operator}, "{line}") cuts it, if it goes element by element'
    if gives_all and inputs and all(shapes) and len({shape[0] for shape in shapes}) == 1:
        letters = (letter for letter in ascii_lowercase if letter != "b")
        terms = [" ".join(["b", *(f"{next(letters)}!" for _ in s[1:])]) for s in shapes]
        line = f"{', '.join(terms[: len(inputs)])} -> {', '.join(terms[len(inputs) :])}"
        return f'register_rule({operator}, "{line}") cuts the batch, if samples do not mix'
    return f"register_rule({operator}, line) says how to cut it, with a letter for each dim"


def operator_of(node: fx.Node) -> str:
    """The name of the operator that a call is of; of that which gives it, of a result."""
    return operator_name(maker(node).target)


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name} = placeholder"
    movement = info(node).movement
    if movement is not None:  # without the names of groups that a rank's own program has
        dims = {"dim": movement.dim, "to_dim": movement.to_dim}
        places = [f"{name}={dim}" for name, dim in dims.items() if dim is not None]
        return (
            f"{node.name} = {operator_name(node.target)}({', '.join([str(node.args[0]), *places])})"
        )
    arguments = [_argument(value) for value in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    return f"{node.name} = {operator_name(node.target)}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, DrawPlace):
        return str(value)
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_argument, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if not isinstance(value, str) else repr(value)


def _remarks(node: fx.Node, origins: bool) -> str:
    parts = []
    movement = info(node).movement
    if movement is not None:
        back = movement.backward if info(node).differentiable else "nothing"
        parts.append(f"{info(node).bytes} bytes over {', '.join(movement.axes)}, back: {back}")
    if (joint := info(node).joint) is not None:
        parts.append(f"{info(node).bytes} bytes over {', '.join(joint.axes)}")
    if info(node).sync:
        parts.append(f"sum of gradients over {', '.join(info(node).sync)}")
    if origins:
        source = (info(node).source or "").split(": ")[0]
        parts += [info(node).module or "", source]
    return "  ".join(part for part in parts if part)


class Listing:
    """A graph that prints as its listing."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def __str__(self) -> str:
        return listing(self.graph)

    __repr__ = __str__
