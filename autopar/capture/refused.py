"""Refused: what an exported program may hold, and no flat graph of dense tensors does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.listing import operator_name
from autopar.capture.source import of_stack
from autopar.errors import InvalidInput
from autopar.strategies import Call
from autopar.strategies.node_info import info


def no_operator(node: fx.Node) -> InvalidInput:
    """A call of what runs a function of its own."""
    return InvalidInput(
        "a captured model is one flat graph of operators",
        got=f"the operator {node.target}, which runs a function of its own",
        remedy="call the function directly",
        source=of_stack(node.meta.get("stack_trace")),
    )


def around_operators(placeholder: fx.Node) -> InvalidInput:
    """A tensor that no operator has made."""
    user = next(iter(placeholder.users), None)
    return InvalidInput(
        "every tensor comes from an input, a parameter, a buffer or an operator",
        got="a tensor that was made around the operators, on the memory of another",
        remedy="compute it by an operator in forward; read a parameter by the attribute in which "
        "it is registered",
        source=of_stack(user.meta.get("stack_trace")) if user is not None else None,
    )


def require_dense(node: fx.Node, value: Any, learns: bool) -> None:
    """Refuse sparse tensors, and gradients that would be."""
    what, remedy = None, "compute with dense tensors and masks"
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            what = f"a tensor of layout {leaf.layout}"
    call = Call(node)
    if learns and call.get("sparse"):
        weight = call["weight"]
        if weight.op != "placeholder" or info(weight).val.requires_grad:
            what, remedy = "a sparse gradient", "sparse=False"
    if what is not None:
        raise InvalidInput(
            "every tensor of a captured model is dense, and so is every gradient",
            got=f"{operator_name(node.target)}, which gives {what}",
            remedy=remedy,
            source=info(node).source,
        )
