"""Operators that move dims about: every one is linear, so partial sums pass through.

A reshape is read from the two shapes: dims are grouped into blocks of equal size, and a block
that merges or splits becomes a group such as (h d), whose outermost factor can be cut evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule, shape_of_piece
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, broadcast, names
from autopar.strategies.strategy import JointCut

FIRST = ((0,),)  # the first input may be a partial sum


def movement_rule(
    call: OperatorCall, inputs: Sequence[Sequence[Dim]], output: Sequence[Dim], **options: Any
) -> Rule:
    """Return the rule of a call that computes nothing; `passes` default to the first input."""
    return call.rule(inputs, output, **{"passes": FIRST, "flops": 0.0, **options})


def same_dims(call: OperatorCall, whole: Iterable[int], **options: Any) -> Rule:
    """Return a rule whose results have the input's dims; those in `whole` may change size."""
    dims = names(len(call.shape))
    out, held = list(dims), {f"d{dim}" for dim in whole}
    for index, (before, after) in enumerate(zip(call.shapes[0], call.shape)):
        if before != after:
            out[index] = (f"n{index}",)
            held |= {f"d{index}", f"n{index}"}
    return movement_rule(call, [dims], out, whole=held, **options)


def along_dims(call: OperatorCall, **options: Any) -> Rule:
    """Return a rule by which the dims that an argument numbers stay whole."""
    return same_dims(call, call.dims(), **options)


def _cumsum(call: OperatorCall) -> Rule:
    """Return the rule of cumsum; a piece begins with the totals of the pieces before it."""
    rule, dims = along_dims(call), call.dims()
    if not dims or not rule.inputs[0][dims[0]]:
        return rule
    (cut,) = rule.inputs[0][dims[0]]
    return replace(
        rule, joints={"carry": JointCut("cut_cumsum", (cut,), (cut,), travelling_rows=1)}
    )


def _reshape(call: OperatorCall) -> Rule:
    into, out, sizes, whole = reshape_factors(call.shapes[0], call.shape)
    inputs = [into, out][: len(call.shapes)]  # view_as has a second input of the wanted shape
    return movement_rule(call, inputs, out, sizes=sizes, whole=whole)


def _is_in_order(call: OperatorCall) -> bool:
    """Return whether a reshape need not copy: its input is laid out in order."""
    return info(call.inputs[0]).val.is_contiguous()


class ReshapeFactors(NamedTuple):
    """The dims of both shapes of a reshape by factors, their sizes, and those that stay whole."""

    inputs: list[Dim]
    outputs: list[Dim]
    sizes: dict[str, int]
    whole: set[str]


def reshape_factors(before: Sequence[int], after: Sequence[int]) -> ReshapeFactors:
    """Return the factors that two shapes of a reshape share.

    Dims before the first of size 0 are matched as far as they agree.
    """
    into: list[Dim] = [()] * len(before)
    out: list[Dim] = [()] * len(after)
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def new(size: int) -> str:
        name = f"d{len(sizes)}"
        sizes[name] = size
        return name

    for left, right in _blocks(before, after):
        first = [before[index] for index in left]
        second = [after[index] for index in right]
        bounds = sorted(set(_running(first)) | set(_running(second)))
        if all(b % a == 0 for a, b in itertools.pairwise(bounds)):
            factors = [new(b // a) for a, b in zip([1, *bounds], bounds)]
            ends = dict(zip(factors, bounds))
            for dims, indices in ((into, left), (out, right)):
                shape = before if dims is into else after
                for index, end in zip(indices, _running([shape[i] for i in indices])):
                    start = end // shape[index]
                    dims[index] = tuple(f for f in factors if start < ends[f] <= end)
            continue
        # The inner bounds do not nest: only a common divisor of the outermost dims is shared.
        shared = new(math.gcd(first[0], second[0]))
        for dims, indices, shape in ((into, left, before), (out, right, after)):
            for place, index in enumerate(indices):
                inner = new(shape[index] // (1 if place else sizes[shared]))
                whole.add(inner)
                dims[index] = (inner,) if place else (shared, inner)
    for dims, shape in ((into, before), (out, after)):
        for index, size in enumerate(shape):
            if size != 1 and not dims[index]:
                dims[index] = (new(size),)
                whole.add(*dims[index])
    return ReshapeFactors(into, out, sizes, whole)


def _blocks(before: Sequence[int], after: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Yield the shortest runs of dims of both shapes with equal products, without size 1."""
    lefts, rights = (
        [index for index, size in enumerate(shape[: [*shape, 0].index(0)]) if size != 1]
        for shape in (before, after)
    )
    while lefts and rights:
        left, right = [lefts.pop(0)], [rights.pop(0)]
        left_size, right_size = before[left[0]], after[right[0]]
        while left_size != right_size:
            if not (lefts if left_size < right_size else rights):
                return  # there are no elements
            if left_size < right_size:
                left.append(lefts.pop(0))
                left_size *= before[left[-1]]
            else:
                right.append(rights.pop(0))
                right_size *= after[right[-1]]
        yield left, right


def _running(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[: index + 1]) for index in range(len(sizes))]


def _permuted(call: OperatorCall) -> Rule:
    dims = names(len(call.shape))
    return movement_rule(call, [dims], [dims[i] for i in order_of_dims(call)])


def order_of_dims(call: OperatorCall) -> list[int]:
    """Return the input's dims in the order of the output, of an operator that permutes dims."""
    rank, (_, *values) = len(call.shape), call.arguments.values()
    arguments = [[call.dim(d) for d in ([g] if isinstance(g, int) else g)] for g in values]
    if "dims" in call.arguments:
        return arguments[0]
    if "destination" in call.arguments:
        source, destination = arguments
        to = dict(zip(destination, source))
        rest = iter(dim for dim in range(rank) if dim not in source)
        return [to[dim] if dim in to else next(rest) for dim in range(rank)]
    # Two dims change places: those named, or the last two.
    order = list(range(rank))
    first, second = (place for (place,) in arguments) if arguments else (rank - 2, rank - 1)
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _order_of_real(call: OperatorCall) -> list[int] | None:
    """Return the order of dims; None of complex numbers, which are conjugated as well."""
    return None if info(call.inputs[0]).val.is_complex() else order_of_dims(call)


def _reversed(call: OperatorCall) -> list[int]:
    return list(reversed(range(len(call.shape))))


def _expand(call: OperatorCall) -> Rule:
    out = names(len(call.shape))
    return movement_rule(call, [broadcast(out, call.shapes[0])], out)


def _repeat_interleave(call: OperatorCall) -> Rule | None:
    if call["dim"] is None or not isinstance(call["repeats"], int):
        return None
    dims, dim = names(len(call.shape)), call.dim(call["dim"])
    out = [(*factor, "repeats") if i == dim else factor for i, factor in enumerate(dims)]
    return call.rule([dims], out, {"repeats": call["repeats"]}, passes=FIRST)


def _interleaved_of_piece(call: OperatorCall, shape: Sequence[int]) -> int:
    """Return `repeats` for a piece: a dim of size 1 is repeated as often as it is long."""
    dim: int = call.dim(call["dim"])
    return shape[dim] if call.shape[dim] == call["repeats"] else call["repeats"]


def _interleaved_size_of_piece(call: OperatorCall, shape: Sequence[int]) -> int | None:
    return None if call["output_size"] is None else shape[call.dim(call["dim"])]


def _concatenate(call: OperatorCall, **options: Any) -> Rule | None:
    """Return the rule of pieces of one dim, linear together; None of torch's empty operand."""
    if len({len(shape) for shape in call.shapes}) != 1:
        return None  # torch's old empty operand of one dim
    out, dim = names(len(call.shape)), call.dim(call["dim"])
    parts = names(len(call.shapes), "n")
    inputs = [[*out[:dim], part, *out[dim + 1 :]] for part in parts]
    passes = [range(len(inputs))]
    return movement_rule(call, inputs, out, whole=[f"d{dim}", *parts], passes=passes, **options)


def _cat(call: OperatorCall) -> Rule | None:
    """Return the rule of cat: its inputs are runs of the output, in which parts may lie."""
    rule = _concatenate(call)
    if rule is None:
        return None
    dim = call.dim(call["dim"])
    sizes = [shape[dim] for shape in call.shapes]
    starts = {f"n{i}": sum(sizes[:i]) for i in range(len(sizes))}
    return replace(rule, spans={f"d{dim}": 0, **starts})


def _stack(call: OperatorCall) -> Rule:
    out, dim = names(len(call.shape)), call.dim(call["dim"], len(call.shape))
    inputs = [out[:dim] + out[dim + 1 :]] * len(call.shapes)
    return movement_rule(call, inputs, out, whole=out[dim], passes=[range(len(inputs))])


def _pad(call: OperatorCall) -> Rule:
    pad, ndim = call["pad"], len(call.shape)
    padded = [ndim - 1 - i // 2 for i, amount in enumerate(pad) if amount]
    constant = call.get("mode", "constant") == "constant"
    linear = not constant or not call.get("value")
    saved = Saved() if constant else Saved((0,))
    return same_dims(call, padded, passes=FIRST if linear else (), saved=saved)


def _values_and_indices(call: OperatorCall, inputs: tuple[int, ...] = ()) -> Rule:
    """Return the rule of values along a dim and their indices, which backward keeps."""
    rule = along_dims(call, passes=())
    return replace(rule, saved=Saved(inputs, extra=(ExtraTensor(rule.outputs[0], torch.int64),)))


def _triangle(call: OperatorCall) -> Rule:
    return same_dims(call, [len(call.shape) - 2, len(call.shape) - 1])


def _diagonal(call: OperatorCall) -> Rule:
    """Return the rule of the diagonal of two dims, which comes last."""
    dims = names(len(call.shapes[0]))
    held = {call.dim(call["dim1"]), call.dim(call["dim2"])}
    rest = [dim for i, dim in enumerate(dims) if i not in held]
    whole = [dims[i] for i in held] + [("k",)]
    return movement_rule(call, [dims], [*rest, ("k",)], whole=whole)


def _diag_embed(call: OperatorCall) -> Rule:
    """Return the rule of diag_embed: the last dim becomes the diagonal of two."""
    ndim = len(call.shape)
    *rest, last = names(ndim - 1)
    new = {call.dim(call["dim1"], ndim): ("x",), call.dim(call["dim2"], ndim): ("y",)}
    others = iter(rest)
    out = [new[i] if i in new else next(others) for i in range(ndim)]
    return movement_rule(call, [[*rest, last]], out, whole=[last, "x", "y"])


def _rot90(call: OperatorCall) -> Rule:
    """Return the rule of quarter turns of two dims."""
    dims = names(len(call.shape))
    first, second = call.dims()
    out = list(dims)
    if call["k"] % 2:
        out[first], out[second] = out[second], out[first]
    return movement_rule(call, [dims], out, whole=[dims[first], dims[second]])


def _windows(call: OperatorCall) -> Rule:
    """Return the rule of the windows of a dim, each along a new last dim."""
    *out, last = names(len(call.shape))
    dim = call.dim(call["dimension"])
    into = [("x",) if i == dim else factor for i, factor in enumerate(out)][: len(call.shapes[0])]
    return movement_rule(call, [into], [*out, last], whole=["x", out[dim] if out else last, last])


def _pixels(call: OperatorCall) -> Rule:
    """Return the rule of pixel shuffles: channels (c y x) become pixels (h y) and (w x)."""
    *batch, _, _, _ = names(len(call.shape))
    deep: list[Dim] = [*batch, ("c", "y", "x"), ("h",), ("w",)]
    wide: list[Dim] = [*batch, ("c",), ("h", "y"), ("w", "x")]
    is_shuffle = "upscale_factor" in call.arguments
    size = call["upscale_factor" if is_shuffle else "downscale_factor"]
    into, out = (deep, wide) if is_shuffle else (wide, deep)
    return movement_rule(call, [into], out, sizes={"y": size, "x": size})


def _renorm(call: OperatorCall) -> Rule:
    """Return the rule of renorm: slices of a dim are scaled to a norm."""
    dim = call.dim(call["dim"])
    return same_dims(call, set(range(len(call.shape))) - {dim}, passes=(), saved=Saved((0,)))


register_rule(aten("flatten ravel view_as reshape_as"), _reshape, traits=Traits(in_order=True))
register_rule(
    "aten.reshape",
    _reshape,
    traits=Traits(view=_is_in_order, in_order=True, of_piece={"shape": shape_of_piece}),
)
register_rule("aten.unsqueeze", _reshape, traits=Traits(view=True, in_order=True))
_VIEW = Traits(view=True, in_order=True, as_reshape=True)
register_rule(aten("view.default unflatten squeeze"), _reshape, traits=_VIEW)
register_rule("aten._unsafe_view", _reshape, traits=Traits(in_order=True, as_reshape=True))
register_rule(
    "aten.transpose.int",
    _permuted,
    traits=Traits(view=True, order=order_of_dims, leading="dim0 dim1"),
)
register_rule(aten("t permute"), _permuted, traits=Traits(view=True, order=order_of_dims))
register_rule(
    aten("swapaxes swapdims mT movedim moveaxis"), _permuted, traits=Traits(order=order_of_dims)
)
register_rule("aten.numpy_T", _permuted, traits=Traits(order=_reversed))
register_rule(aten("adjoint matrix_H"), _permuted, traits=Traits(order=_order_of_real))
register_rule("aten.expand", _expand, traits=Traits(view=True, of_piece={"size": shape_of_piece}))
register_rule("aten.expand_as", "..., ... -> ...", passes=[(0,)], cost=0)
register_rule(
    "aten.repeat_interleave.self_int",
    _repeat_interleave,
    traits=Traits(
        of_piece={"repeats": _interleaved_of_piece, "output_size": _interleaved_size_of_piece}
    ),
)
register_rule("aten.cat", _cat)
register_rule("aten.diff", partial(_concatenate, flops=None))
register_rule("aten.stack", _stack)
register_rule(aten("pad constant_pad_nd"), _pad)
register_rule("aten.cumsum", _cumsum)
register_rule(aten("flip roll"), along_dims)
register_rule(
    aten("argsort cumprod logcumsumexp"),
    partial(along_dims, passes=(), saved=Saved((0,), output=True)),
)
register_rule("aten.glu", partial(along_dims, passes=(), saved=Saved((0,))))
register_rule(aten("topk sort"), _values_and_indices)
register_rule(aten("cummax cummin"), partial(_values_and_indices, inputs=(0,)))
register_rule("aten.view_as_real", "... -> ... two!", passes="all", cost=0)
register_rule("aten.view_as_complex", "... two! -> ...", passes="all", cost=0)
register_rule("aten.channel_shuffle", "n c! ... -> n c! ...", passes="all", cost=0)
register_rule("aten.pixel_shuffle", _pixels)
register_rule("aten.pixel_unshuffle", _pixels)
register_rule(aten("tril triu"), _triangle)
register_rule("aten.diagonal", _diagonal, traits=Traits(view=True))
register_rule("aten.diag_embed", _diag_embed)
register_rule("aten.trace", "x! y! -> ", passes="all", cost=0)
register_rule("aten.rot90", _rot90)
register_rule("aten.unfold", _windows, traits=Traits(view=True))
register_rule("aten.renorm", _renorm)
