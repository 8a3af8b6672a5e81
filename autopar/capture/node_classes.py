"""Alike: calls of one graph that have the same strategies and costs on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result, tensors_of


def number_calls(graph: fx.Graph) -> dict[str, int]:
    """A number for each call of an operator by its name; calls with the same number are alike.

    They have the same operator and constants, the same shapes and dtypes of tensors, and the
    same of their inputs are one tensor."""
    numbers: dict[Any, int] = {}
    return {
        node.name: numbers.setdefault(_described(node), len(numbers))
        for node in graph.nodes
        if node.op == "call_function" and not is_result(node)
    }


def _described(node: fx.Node) -> tuple[Any, ...]:
    inputs = node.all_input_nodes
    slots = {value: _Slot(index) for index, value in enumerate(inputs)}
    constants = constants_of(node, slots)
    tensors = tuple((*_form(value), info(value).differentiable) for value in inputs)
    return node.target, constants, tensors, _form(node), info(node).on_host, info(node).learns


def constants_of(node: fx.Node, names: Mapping[fx.Node, object]) -> str:
    """What a call is given, with names for the tensors. Which of a program's draws it makes, and
    where a piece of it starts, is nothing by which calls differ: the shape of all of it is."""
    args = [f"draw of {a.shape}" if isinstance(a, DrawPlace) else a for a in node.args]
    return repr(fx.map_arg((args, node.kwargs), names.__getitem__))  # type: ignore[arg-type]


def _form(value: fx.Node) -> tuple[Any, ...]:
    tensors = tensors_of(value)
    return (
        *((tuple(t.shape), t.dtype, t.is_contiguous()) for t in tensors),
        info(value).parts,
    )


class _Slot:
    """Stands for a tensor argument in the description of a call."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"
