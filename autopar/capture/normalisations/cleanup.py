"""What a program does not need: assertions, dead code, operators that do nothing."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument
from autopar.capture.normalisations.shapes import permutation
from autopar.capture.randomness import may_be_random
from autopar.strategies.node_info import info

aten = torch.ops.aten

_ASSERTIONS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym_constrain")


def drop_assertions(draft: GraphBuilder) -> None:
    """Assertions hold for the shapes that were captured."""
    for node in reversed(list(draft.calls())):
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith(_ASSERTIONS):
            draft.graph.erase_node(node)


def drop_dead_code(draft: GraphBuilder) -> None:
    """Calls that nothing uses; placeholders of parameters, buffers and inputs stay."""
    for node in reversed(list(draft.calls())):
        if not node.users:
            draft.graph.erase_node(node)
    for node in list(draft.graph.find_nodes(op="placeholder")):
        if node.name in draft.constants and not node.users:
            draft.graph.erase_node(node)
            del draft.constants[node.name]


def drop_dropout(draft: GraphBuilder) -> None:
    """Dropout with probability 0, or in eval mode, does nothing."""
    kinds = (aten.dropout, aten.dropout_, aten.feature_dropout, aten.feature_dropout_)
    for node in draft.calls(*(kind.default for kind in kinds)):
        if not argument(node, "train") or argument(node, "p") == 0:
            draft.substitute(node, node.args[0])  # type: ignore[arg-type]


_NAMES = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
    aten.divide.Tensor: aten.div.Tensor,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.special_expit.default: aten.sigmoid.default,
}


def canonical_names(draft: GraphBuilder) -> None:
    """Operators with several names have one."""
    for node in draft.calls(*_NAMES):
        node.target = _NAMES[node.target]  # type: ignore[index]


def canonical_casts(draft: GraphBuilder) -> None:
    """Every cast is to.dtype; one to the dtype that a tensor has does nothing."""
    for node in draft.calls():
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.overloadpacket not in (aten.to, aten._to_copy, aten.type_as):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dtype = info(node).val.dtype
        if info(source).val.dtype == dtype:
            draft.substitute(node, source)
        elif node.target is not aten.to.dtype or len(node.args) != 2 or node.kwargs:
            draft.replace(node, aten.to.dtype, source, dtype)


_CREATIONS = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.zeros.default,
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros.default,
}


def creations_read_no_tensor(draft: GraphBuilder) -> None:
    """What a tensor lent its dtype is made without it; fresh memory is zero on every rank."""
    for node in draft.calls(*_CREATIONS):
        value = info(node).val
        fill = (argument(node, "fill_value"),) if node.target is aten.new_full.default else ()
        made = _CREATIONS[node.target]  # type: ignore[index]
        kind = {"dtype": value.dtype, "device": value.device}
        draft.replace(node, made, list(value.shape), *fill, **kind)


_COUNTS = (aten.linspace, aten.logspace)
_NORMS = {aten.linalg_vector_norm: "ord", aten.norm: "p", aten.dist: "p"}


def norms_of_vectors(draft: GraphBuilder) -> None:
    """A norm that torch takes of vectors says so; those of matrices stay."""
    for node in draft.calls(aten.linalg_norm.default):
        value, order, dim = (argument(node, name) for name in ("self", "ord", "dim"))
        whole = order is None and dim is None
        if whole or len(info(value).val.shape if dim is None else dim) == 1:
            keep, dtype = argument(node, "keepdim"), argument(node, "dtype")
            call = (value, 2 if order is None else order, dim, keep)
            draft.replace(node, aten.linalg_vector_norm.default, *call, dtype=dtype)


def values_alone_are_read(draft: GraphBuilder) -> None:
    """Of ends of a count that are tensors, and of norms of order 0, torch has no gradient."""
    for node in draft.calls():
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _COUNTS or (packet in _NORMS and argument(node, _NORMS[packet]) == 0):
            for value in node.all_input_nodes:
                with draft.graph.inserting_before(node):
                    alone = draft.call(node, aten.detach.default, value)
                node.replace_input_with(value, alone)


def drop_copies(draft: GraphBuilder) -> None:
    """Copies and aliases: values of a functional program are never written to."""
    copies = (
        aten.contiguous.default,
        aten.alias.default,
        aten.clone.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten.positive.default,
    )
    for node in draft.calls(*copies):
        draft.substitute(node, node.args[0])  # type: ignore[arg-type]


def drop_identities(draft: GraphBuilder) -> None:
    """Operators that give back their first argument: x * 1, x + 0, full slices, same shapes."""
    for node in draft.calls():
        if node.args and isinstance(node.args[0], fx.Node) and _is_identity(node):
            draft.substitute(node, node.args[0])


def _is_identity(node: fx.Node) -> bool:
    source, value = info(node.args[0]).val, info(node).val  # type: ignore[arg-type]
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if source.shape != value.shape or source.dtype != value.dtype:
        return False
    target = node.target
    if target in (aten.expand.default, aten.reshape.default, aten.slice.Tensor, aten.squeeze.dim):
        return True
    if target in (aten.mul.Tensor, aten.div.Tensor) and not isinstance(node.args[1], fx.Node):
        return bool(node.args[1] == 1)
    if target in (aten.add.Tensor, aten.sub.Tensor) and not isinstance(node.args[1], fx.Node):
        return bool(node.args[1] == 0)
    if target in (aten.transpose.int, aten.permute.default):
        return permutation(node) == list(range(source.ndim))
    if target is aten.pad.default:
        return not any(argument(node, "pad"))
    return False


def drop_detaches(draft: GraphBuilder) -> None:
    """A detach of what has no gradient does nothing."""
    for node in draft.calls(aten.detach.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if not info(source).differentiable:
            draft.substitute(node, source)


def merge_duplicates(draft: GraphBuilder) -> None:
    """Equal calls without gradient and without randomness are made once."""
    seen: dict[tuple, fx.Node] = {}
    for node in draft.calls():
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if not is_operator or may_be_random(node) or info(node).differentiable:
            continue
        key = (node.target, str(node.args), str(node.kwargs))
        if key in seen:
            draft.substitute(node, seen[key])
        else:
            seen[key] = node
