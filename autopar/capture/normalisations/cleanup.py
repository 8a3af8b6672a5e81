"""What a program does not need: assertions, dead code, operators that do nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, rewrites
from autopar.capture.marker import ANNOTATE, Annotation
from autopar.capture.randomness import may_be_random
from autopar.strategies.node_info import info
from autopar.strategies.registry import permutation

aten = torch.ops.aten

_ASSERTIONS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym_constrain")


def drop_assertions(builder: GraphBuilder) -> None:
    """Assertions hold for the shapes that were captured."""
    for node in reversed(list(builder.calls())):
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith(_ASSERTIONS):
            builder.graph.erase_node(node)


def note_unread_annotations(builder: GraphBuilder) -> None:
    """Note the annotations of tensors that nothing reads which forward returns or changes."""
    read = set[fx.Node]()
    for node in reversed(builder.graph.nodes):
        if node.op == "output" or node in read:
            read.update(node.all_input_nodes)
    # After a write to its tensor, a marker stands again.
    markers = {str(node.args[1]): info(node).module for node in builder.calls(ANNOTATE)}
    are_read = {str(node.args[1]) for node in builder.calls(ANNOTATE) if node in read}
    unread = markers.keys() - are_read
    builder.unread_annotations |= {Annotation.decode(k): markers[k] for k in markers if k in unread}


def drop_dead_code(builder: GraphBuilder) -> None:
    """Calls that nothing uses; placeholders of parameters, buffers and inputs stay."""
    for node in reversed(list(builder.calls())):
        if not node.users:
            builder.graph.erase_node(node)
    for node in list(builder.graph.find_nodes(op="placeholder")):
        if node.name in builder.constants and not node.users:
            builder.graph.erase_node(node)
            del builder.constants[node.name]


_DROPOUTS = "dropout feature_dropout alpha_dropout feature_alpha_dropout"


@rewrites(*(getattr(aten, name + end) for name in _DROPOUTS.split() for end in ("", "_")))
def drop_dropout(call: Site) -> fx.Node | None:
    """Dropout with probability 0, or in eval mode, does nothing."""
    return call.inputs[0] if not call["train"] or call["p"] == 0 else None


@rewrites(aten.rrelu, aten.rrelu_)
def slopes_are_drawn_in_training_alone(call: Site) -> fx.Node | None:
    """Out of training the slope of rrelu is the middle of its range."""
    if call["training"]:
        return None
    target = aten.leaky_relu_ if call.node.target is aten.rrelu_.default else aten.leaky_relu
    return call.make(target.default, call["self"], (call["lower"] + call["upper"]) / 2)


def casts_stand_where_they_are_read(builder: GraphBuilder) -> None:
    """What is kept in one dtype and read in another is cast when it is first read."""
    places = {node: place for place, node in enumerate(builder.graph.nodes)}
    for node in builder.calls(aten.to.dtype):
        (value,) = node.all_input_nodes
        if value.op == "placeholder" and node.users:
            min(node.users, key=places.__getitem__).prepend(node)


def _by_another_name(pairs: str) -> dict[object, Any]:
    """Overloads of an operator to those of another that is the same."""
    found: dict[object, Any] = {}
    for pair in pairs.split(", "):
        packet, other = (getattr(aten, name) for name in pair.split())
        for name in {*packet.overloads()} & {*other.overloads()}:
            taken, given = getattr(packet, name)._schema, getattr(other, name)._schema
            if [(a.name, a.kwarg_only) for a in taken.arguments] == [
                (a.name, a.kwarg_only) for a in given.arguments
            ]:
                found[getattr(packet, name)] = getattr(other, name)
    return found


_NAMES: dict[object, Any] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
    **_by_another_name(
        "absolute abs, arccos acos, arccosh acosh, arcsin asin, arcsinh asinh, arctan atan, "
        "arctanh atanh, arctan2 atan2, clip clamp, fix trunc, negative neg, multiply mul, "
        "subtract sub, divide div, true_divide div, greater gt, greater_equal ge, less lt, "
        "less_equal le, not_equal ne, concat cat, concatenate cat, ger outer, "
        "matrix_exp linalg_matrix_exp, matrix_power linalg_matrix_power, "
        "linalg_matmul matmul, trapz trapezoid, special_digamma digamma, special_erf erf, "
        "special_erfc erfc, special_erfinv erfinv, special_exp2 exp2, special_expit sigmoid, "
        "special_expm1 expm1, special_gammainc igamma, special_gammaincc igammac, "
        "special_gammaln lgamma, special_i0 i0, special_log1p log1p, special_logit logit, "
        "special_logsumexp logsumexp, special_multigammaln mvlgamma, special_psi digamma, "
        "special_polygamma polygamma, special_sinc sinc"
    ),
}


def canonical_names(builder: GraphBuilder) -> None:
    """Operators with several names have one."""
    for node in builder.calls(*_NAMES):
        node.target = _NAMES[node.target]


_COPIES = (
    "alias_copy detach_copy diagonal_copy expand_copy narrow_copy permute_copy "
    "select_copy slice_copy split_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy "
    "unbind_copy unfold_copy unsqueeze_copy view_as_complex_copy view_as_real_copy view_copy"
)


@rewrites(*(getattr(aten, name) for name in _COPIES.split()))
def copies_are_views(call: Site) -> None:
    """A copy of a view is that view: values of a functional program are never written to."""
    target = call.node.target
    view = getattr(aten, target.overloadpacket.__name__.removesuffix("_copy"))  # type: ignore[union-attr]
    call.node.target = getattr(view, target._overloadname)  # type: ignore[union-attr]


@rewrites(aten.to, aten._to_copy, aten.type_as, aten.chalf)
def canonical_casts(call: Site) -> fx.Node | None:
    """Every cast is to.dtype; one to the dtype that a tensor has does nothing."""
    source: fx.Node = call["self"]
    dtype = call.outputs[0].dtype
    if info(source).val.dtype == dtype:
        return source
    return call.canonical(aten.to.dtype, source, dtype)


_CREATIONS = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.zeros.default,
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros.default,
}


@rewrites(*_CREATIONS)
def creations_read_no_tensor(call: Site) -> fx.Node:
    """What a tensor lent its dtype is made without it; fresh memory is zero on every rank."""
    (value,), target = call.outputs, call.node.target
    fill = (call["fill_value"],) if target is aten.new_full.default else ()
    kind = {"dtype": value.dtype, "device": value.device}
    return call.make(_CREATIONS[target], list(value.shape), *fill, **kind)  # type: ignore[index]


@rewrites(aten.cat.default)
def nothing_is_not_joined(call: Site) -> fx.Node | None:
    """Of what is joined, a vector of no elements says nothing, whatever the dims of the others;
    what is joined with nothing else is itself."""
    dims = len(call.shape)
    some = [node for node in call["tensors"] if dims == 1 or info(node).val.shape != (0,)]
    if not some or len(some) == len(call["tensors"]) > 1:
        return None
    joined = some[0] if len(some) == 1 else call.make(aten.cat.default, some, call["dim"])
    dtype = call.outputs[0].dtype
    return joined if info(joined).val.dtype == dtype else call.make(aten.to.dtype, joined, dtype)


@rewrites(aten.linalg_norm.default, aten.norm, aten.dist)
def norms_of_vectors(call: Site) -> fx.Node | None:
    """Norms and distances that torch takes of vectors say so; those of matrices stay."""
    make, packet = call.make, call.node.target.overloadpacket  # type: ignore[union-attr]
    value, order, dim = call["self"], call.get("ord", call.get("p")), call.get("dim")
    is_general = packet is aten.linalg_norm and not (dim is None and order is None)
    if is_general and len(call.shapes[0] if dim is None else dim) != 1:
        return None
    if packet is aten.dist:
        value = make(aten.sub.Tensor, value, call["other"])
    order, keep = 2 if order is None else order, call.get("keepdim", False)
    return make(aten.linalg_vector_norm.default, value, order, dim, keep, dtype=call.get("dtype"))


@rewrites(aten.linspace, aten.logspace, aten.linalg_vector_norm)
def values_alone_are_read(call: Site) -> None:
    """Of ends of a count that are tensors, and of norms of order 0, torch has no gradient."""
    if call.get("ord", 0) == 0:
        for value in call.node.all_input_nodes:
            call.node.replace_input_with(value, call.make(aten.detach.default, value))


@rewrites(aten._conj, aten._neg_view)
def numbers_are_as_in_memory(call: Site) -> fx.Node:
    """What is marked to be read conjugate, or negative, is so: a movement sends memory."""
    if call.node.target is aten._conj.default:
        return call.make(aten.conj_physical.default, *call.inputs)
    return call.make(aten.neg.default, *call.inputs)


@rewrites(
    aten.contiguous.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.positive.default,
)
def drop_copies(call: Site) -> fx.Node:
    """Copies and aliases: values of a functional program are never written to."""
    return call.inputs[0]


_NEUTRAL = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0}
_OF_SHAPES = (aten.expand.default, aten.reshape.default, aten.slice.Tensor, aten.squeeze.dim)


@rewrites(*_NEUTRAL, *_OF_SHAPES, aten.transpose.int, aten.permute.default, aten.pad.default)
def drop_identities(call: Site) -> fx.Node | None:
    """Operators that give back their first argument: x * 1, x + 0, full slices, same shapes."""
    source, (value,), target = call.node.args[0], call.outputs, call.node.target
    if not isinstance(source, fx.Node) or info(source).val.dtype != value.dtype:
        return None
    if info(source).val.shape != value.shape:
        return None
    order = permutation(call.node)
    is_identity = (
        target in _OF_SHAPES
        or (target in _NEUTRAL and call["other"] == _NEUTRAL[target])
        or (order is not None and order == sorted(order))
        or (target is aten.pad.default and not any(call["pad"]))
    )
    return source if is_identity else None


@rewrites(aten.detach.default)
def drop_detaches(call: Site) -> fx.Node | None:
    """A detach of what has no gradient does nothing."""
    (source,) = call.inputs
    return None if info(source).differentiable else source


def merge_duplicates(builder: GraphBuilder) -> None:
    """Equal calls without gradient and without randomness are made once."""
    seen: dict[tuple, fx.Node] = {}
    for node in builder.calls():
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if not is_operator or may_be_random(node) or info(node).differentiable:
            continue
        key = (node.target, str(node.args), str(node.kwargs))
        if key in seen:
            builder.substitute(node, seen[key])
        else:
            seen[key] = node
