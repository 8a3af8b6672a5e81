"""Parts: an operator that torch makes of others, and that has no rule, is these others.

    hstack(a, b)    ->    cat([a, b], 1)

torch makes it of the same ones when it runs, so values and gradients stay what they are, and each
part can be cut by its own rule. Where a part has no rule, the operator stays as it is: it runs
whole, as one call. So do those that would be unrolled.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch.operators import below_autograd
from autopar.capture.graph_builder import REWRITTEN, GraphBuilder
from autopar.capture.normalisations.inplace import functional_of
from autopar.capture.normalisations.tuples import PIECES
from autopar.capture.randomness import may_be_random
from autopar.strategies import has_rule
from autopar.strategies.node_info import info

MOST = 64  # parts: what has more is unrolled over the steps of a sequence


def composites_are_their_parts(builder: GraphBuilder) -> None:
    """An operator without a rule is what torch makes it of, if that has rules."""
    for node in builder.calls():
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if is_operator and not _is_known(node.target) and not may_be_random(node):
            _taken_apart(builder, node)


class _Unknown(Exception):
    """An operator has a part that stays as it is."""


class _Parts(TorchDispatchMode):
    """Notes the calls that an operator is made of, down to those that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor for its device
            return func(*args, **kwargs)
        if not _is_known(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is NotImplemented:
                raise _Unknown
            return made
        if not torch.is_grad_enabled() or len(self.calls) == MOST:
            raise _Unknown
        made = func(*args, **kwargs)
        if _tensors(made):
            self.calls.append((func, args, kwargs, made))
        return made


def _is_known(target: Any) -> bool:
    """Whether an operator has a rule, or will be given another form."""
    named = {target, target.overloadpacket}
    return has_rule(functional_of(target) or target) or not named.isdisjoint({*REWRITTEN, *PIECES})


def _taken_apart(builder: GraphBuilder, node: fx.Node) -> None:
    """Put the parts of a call in its place, if all of them are known."""
    given: dict[fx.Node, Any] = {}
    for value in node.all_input_nodes:
        fake = info(value).val
        given[value] = fake.detach() if isinstance(fake, Tensor) else fake
    args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
    args, kwargs = pytree.tree_map(lambda x: x, (list(args), dict(kwargs)))
    parts = _Parts()
    try:
        with builder.mode, torch.enable_grad(), below_autograd(), parts:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # a part is not known, or torch raises what it did not for the call
        return
    known = {id(fake) for fake in given.values()}
    for _, args, kwargs, results in parts.calls:
        if not all(id(tensor) in known for tensor in _tensors((args, kwargs))):
            return  # one that torch made in passing
        known |= set(map(id, _tensors(results)))
    if all(id(tensor) in known for tensor in _tensors(made)):
        _put(builder, node, {id(fake): value for value, fake in given.items()}, parts, made)


def _put(
    builder: GraphBuilder, node: fx.Node, nodes: dict[int, fx.Node], parts: _Parts, made: Any
) -> None:
    """The calls that were noted, then what the call gave; `nodes` by the tensors it was given."""

    def of(value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: nodes[id(tensor)], value)

    with builder.graph.inserting_before(node):
        for target, args, kwargs, results in parts.calls:
            new = builder.call(node, target, *of(args), **of(kwargs))
            if isinstance(results, Tensor):
                nodes[id(results)] = new
                continue
            for place, result in enumerate(results):
                nodes[id(result)] = builder.call(node, operator.getitem, new, place)
    _read(builder, node, of(made))


def _read(builder: GraphBuilder, node: fx.Node, value: Any) -> None:
    """Let what reads a call read `value`, which may be a list of nodes."""
    if isinstance(value, fx.Node):
        builder.substitute(node, value)
        return
    for user in list(node.users):
        _read(builder, user, value[user.args[1]])
    builder.graph.erase_node(node)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
