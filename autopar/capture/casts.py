"""Casts: what autocast does to the calls in it.

What it names itself has its operands cast, to one dtype. What is left to its parts (a cell of a
recurrent layer on the CPU) is those, cast one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar._torch.operators import has_kernel
from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.listing import operator_name
from autopar.capture.mapped import over_all
from autopar.capture.source import of_stack
from autopar.errors import InvalidInput
from autopar.strategies.node_info import info

aten = torch.ops.aten
Autocast = Callable[[], Any]
# They refuse tensors of several dtypes, which without values nobody finds.
_NAMES = (
    "matmul mm bmm mv dot vdot inner addmm addmv addbmm baddbmm linalg_vecdot einsum "
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"
)
_OF_ONE_DTYPE = {getattr(aten, name) for name in _NAMES.split()}
# Their kernels make products that only autocast sees.
_HIDING = (aten.bilinear.default,)
# Their fakes multiply tensors of several dtypes, which torch does not.
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default)


def cast_dtype(
    builder: GraphBuilder, node: fx.Node, args: Any, kwargs: Any, autocast: Autocast
) -> torch.dtype | None:
    """To what autocast casts the operands of a call, seen from its result; None if it does not."""
    if node.target in _HIDING and _is_left(node, args, kwargs):
        raise InvalidInput(
            "autocast casts the operands of calls that torch shows",
            got=f"{operator_name(node.target)}, inside of which it casts",
            remedy="with torch.autocast(x.device.type, enabled=False): around it, of operands that "
            "are cast before (x.to(torch.bfloat16)), or not",
            source=of_stack(node.meta.get("stack_trace")),
        )
    with autocast():
        result = builder.evaluate(node.target, args, kwargs, is_plain=False)  # type: ignore[arg-type]
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not tensors or not tensors[0].is_floating_point():
        return None
    wanted = tensors[0].dtype
    is_mixed = getattr(node.target, "overloadpacket", None) in _OF_ONE_DTYPE and any(
        value.dtype not in (wanted, torch.float64) for value in _read(args, kwargs).values()
    )
    if not is_mixed and _plain_dtype(builder, node, args, kwargs) == wanted:
        return None
    return wanted


def cast_parts(
    builder: GraphBuilder, node: fx.Node, args: Any, kwargs: Any, autocast: Autocast
) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """The parts of a call under autocast, and what they read, where these alone are cast."""
    if not _is_left(node, args, kwargs):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def function(*tensors: Any) -> list[Any]:
        by_node = dict(zip(given, tensors))
        values = [by_node[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(values, spec)
        with autocast():
            return pytree.tree_leaves(node.target(*own_args, **own_kwargs))  # type: ignore[operator]

    module = over_all(function, given, builder.mode, node)
    is_cast = any(one.target is aten._to_copy.default for one in module.graph.nodes)
    return (module, given) if is_cast else None


def _is_left(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether a call of several operands is left to its parts."""
    read, target = _read(args, kwargs), node.target
    if len(read) < 2 or not isinstance(target, torch._ops.OpOverload):
        return False
    key = f"Autocast{next(iter(read.values())).device.type.upper()}"
    is_composite = has_kernel(target, "CompositeImplicitAutograd")
    return (
        is_composite and not has_kernel(target, key) and target.overloadpacket not in _OF_ONE_DTYPE
    )


def _read(args: Any, kwargs: Any) -> dict[fx.Node, torch.Tensor]:
    """The operands of a call that could be cast."""
    nodes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
    values = {node: info(node).val for node in nodes}
    return {
        node: value
        for node, value in values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def _plain_dtype(
    builder: GraphBuilder, node: fx.Node, args: Any, kwargs: Any
) -> torch.dtype | None:
    """The dtype that the operator would give without autocast, if it would run at all."""
    if node.target in _PRODUCTS and len({info(value).val.dtype for value in args[:2]}) > 1:
        return None
    try:
        result = builder.evaluate(node.target, args, kwargs)  # type: ignore[arg-type]
    except RuntimeError:
        return None
    leaf = pytree.tree_leaves(result)[0]
    return leaf.dtype if isinstance(leaf, torch.Tensor) else None
