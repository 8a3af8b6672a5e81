"""Refused: what an exported program may hold, and no flat graph of dense tensors does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.export.graph_signature import InputSpec
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from autopar.capture.hooks import replaced
from autopar.capture.listing import operator_name
from autopar.capture.source import of_stack
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.node_info import info
from autopar.text.source_lines import caller

_OF_SHAPES = "every tensor of a captured model has a shape that follows from shapes alone"


@contextmanager
def packed_sequences_refused() -> Iterator[None]:
    """Within, forward makes no packed sequence, whose rows depend on lengths."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(
            _OF_SHAPES,
            got="a packed sequence (pack_padded_sequence), whose rows follow from lengths",
            remedy="run the layer on the padded tensor, and mask what is padding in what it gives",
            source=caller(),
        )

    with replaced(PackedSequence, "__new__", staticmethod(refuse)):
        yield


def no_tensor(node: fx.Node, spec: InputSpec, value: object) -> InvalidInput:
    """An object that is no tensor, which a program reads, as a generator of random numbers."""
    if not isinstance(value, torch.Generator):
        return InvalidInput(
            "a captured model takes tensors and plain values",
            got=f"{spec.kind.name.lower().replace('_', ' ')} {spec.target}",
            remedy="keep objects of other kinds out of forward",
        )
    user = next(iter(node.users), node)
    return InvalidInput(
        "random numbers in forward are those of torch.manual_seed(), by the place of an element",
        got="a torch.Generator that forward draws from",
        remedy="leave out generator=; or draw outside of forward, and hand the numbers over as "
        "an input",
        source=of_stack(user.meta.get("stack_trace")),
    )


def require_no_script(path: str, module: nn.Module) -> None:
    """Refuse a module of TorchScript, whose operators capture does not see."""
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidInput(
            "a model consists of modules of Python, which capture follows",
            got=f"{path or 'the model'}, a module of TorchScript (torch.jit.script or trace)",
            remedy="the module that it was made of; functions may be scripted",
        )


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
    call = OperatorCall(node)
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
