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

import torch

from autopar.strategies.node_info import info
from autopar.strategies.registry import Call, Traits, aten, register_rule
from autopar.strategies.rule import Dim, Extra, Rule, Saved, render

FIRST = ((0,),)  # the first input may be a partial sum
VIEW = Traits(view=True)


def names(count: int, prefix: str = "d") -> list[Dim]:
    return [(f"{prefix}{index}",) for index in range(count)]


def sizes_of(dims: Sequence[Dim], shape: Sequence[int]) -> dict[str, int]:
    return {dim[0]: size for dim, size in zip(dims, shape)}


def same_dims(
    call: Call,
    whole: Iterable[int],
    passes: Sequence[Sequence[int]] = FIRST,
    saved: Saved = Saved(),  # noqa: B008 (frozen)
) -> Rule:
    """The output has the dims of the input; those in `whole` stay whole, and may change size."""
    dims, shape = names(len(call.shape)), call.shapes[0]
    sizes, out = sizes_of(dims, shape), list(dims)
    held = {f"d{dim}" for dim in whole}
    for index, (before, after) in enumerate(zip(shape, call.shape)):
        if before != after:
            out[index] = (f"n{index}",)
            sizes[f"n{index}"] = after
            held |= {f"d{index}", f"n{index}"}
    return call.rule([dims], out, sizes, whole=held, passes=passes, flops=0.0, saved=saved)


def _reshape(call: Call) -> Rule:
    into, out, sizes, whole = reshape_factors(call.shapes[0], call.shape)
    inputs = [into, out][: len(call.shapes)]  # view_as has a second input of the wanted shape
    return call.rule(inputs, out, sizes, whole=whole, passes=FIRST, flops=0.0)


def _in_order(call: Call) -> bool:
    """Whether a reshape need not copy: its input is laid out in order."""
    return info(call.inputs[0]).val.is_contiguous()


def reshape_factors(
    before: Sequence[int], after: Sequence[int]
) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """The dims of both shapes by shared factors, their sizes, and those that stay whole."""
    into: list[Dim] = [()] * len(before)
    out: list[Dim] = [()] * len(after)
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def new(size: int) -> str:
        name = f"d{len(sizes)}"
        sizes[name] = size
        return name

    if 0 in before:
        for dims, shape in ((into, before), (out, after)):
            for index, size in enumerate(shape):
                dims[index] = (new(size),)
        return into, out, sizes, set(sizes)
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
    return into, out, sizes, whole


def _blocks(before: Sequence[int], after: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Runs of dims of both shapes with equal products, as short as can be; size 1 left out."""
    lefts = [index for index, size in enumerate(before) if size != 1]
    rights = [index for index, size in enumerate(after) if size != 1]
    while lefts:
        left, right = [lefts.pop(0)], [rights.pop(0)]
        one, two = before[left[0]], after[right[0]]
        while one != two:
            if one < two:
                left.append(lefts.pop(0))
                one *= before[left[-1]]
            else:
                right.append(rights.pop(0))
                two *= after[right[-1]]
        yield left, right


def _running(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[: index + 1]) for index in range(len(sizes))]


def _permuted(call: Call, order: Sequence[int]) -> Rule:
    """Dim i of the output is dim order[i] of the input."""
    dims = names(len(order))
    sizes = sizes_of(dims, call.shapes[0])
    return call.rule([dims], [dims[i] for i in order], sizes, passes=FIRST, flops=0.0)


def _transpose(call: Call) -> Rule:
    ndim = len(call.shape)
    order = list(range(ndim))
    first = call.dim(call.get("dim0", call.get("axis0", 0)))
    second = call.dim(call.get("dim1", call.get("axis1", 1)))
    if ndim > 1:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _last_two_swapped(call: Call) -> Rule:
    order = list(range(len(call.shape)))
    order[-2:] = reversed(order[-2:])
    return _permuted(call, order)


def _permute(call: Call) -> Rule:
    return _permuted(call, [call.dim(dim) for dim in call["dims"]])


def _movedim(call: Call) -> Rule:
    source, destination = call["source"], call["destination"]
    if isinstance(source, int):
        source, destination = [source], [destination]
    source = [call.dim(dim) for dim in source]
    moved = dict(zip([call.dim(dim) for dim in destination], source))
    rest = iter(dim for dim in range(len(call.shape)) if dim not in source)
    return _permuted(call, [moved[i] if i in moved else next(rest) for i in range(len(call.shape))])


def _expand(call: Call) -> Rule:
    out = names(len(call.shape))
    sizes = sizes_of(out, call.shape)
    shape = call.shapes[0]
    aligned = out[len(out) - len(shape) :]
    into = [() if size == 1 else dim for dim, size in zip(aligned, shape)]
    return call.rule([into], out, sizes, passes=FIRST, flops=0.0)


def _repeat(call: Call) -> Rule:
    repeats, shape = call["repeats"], call.shapes[0]
    out = names(len(repeats))
    sizes = sizes_of(out, call.shape)
    into: list[Dim] = []
    whole: list[str] = []
    for index, size in enumerate(shape, len(repeats) - len(shape)):
        if size == 1:
            into.append(())
        elif repeats[index] == 1:
            into.append(out[index])
        else:  # whole copies can be dealt out; pieces of a copy would interleave
            copied, times = f"n{index}", f"times{index}"
            into.append((copied,))
            out[index] = (times, copied)
            sizes |= {copied: size, times: repeats[index]}
            del sizes[f"d{index}"]
            whole.append(copied)
    return call.rule([into], out, sizes, whole=whole, passes=FIRST)


def _repeat_interleave(call: Call) -> Rule | None:
    if call["dim"] is None or not isinstance(call["repeats"], int):
        return None
    dim = call.dim(call["dim"])
    dims = names(len(call.shape))
    sizes = sizes_of(dims, call.shapes[0]) | {"repeats": call["repeats"]}
    out = [(*factor, "repeats") if i == dim else factor for i, factor in enumerate(dims)]
    return call.rule([dims], out, sizes, passes=FIRST)


def _concatenate(call: Call) -> Rule | None:
    if len({len(shape) for shape in call.shapes}) != 1:
        return None  # torch's old empty operand of one dim
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    sizes = sizes_of(out, call.shape)
    inputs = []
    for index, shape in enumerate(call.shapes):
        part = f"n{index}"
        sizes[part] = shape[dim]
        inputs.append([(part,) if i == dim else factor for i, factor in enumerate(out)])
    whole = [f"d{dim}", *(f"n{index}" for index in range(len(inputs)))]
    together = [range(len(inputs))]
    return call.rule(inputs, out, sizes, whole=whole, passes=together, flops=0.0)


def _stack(call: Call) -> Rule:
    dim = call.dim(call["dim"], len(call.shape))
    out = names(len(call.shape))
    into = [factor for i, factor in enumerate(out) if i != dim]
    inputs = [into] * len(call.shapes)
    return call.rule(
        inputs,
        out,
        sizes_of(out, call.shape),
        whole=[f"d{dim}"],
        passes=[range(len(inputs))],
        flops=0.0,
    )


def _pad(call: Call) -> Rule:
    pad, ndim = call["pad"], len(call.shape)
    padded = [ndim - 1 - i // 2 for i, amount in enumerate(pad) if amount]
    constant = call.get("mode", "constant") == "constant"
    linear = not constant or not call.get("value")
    return same_dims(call, padded, FIRST if linear else (), Saved() if constant else Saved((0,)))


def _whole_dim(call: Call) -> Rule:
    return same_dims(call, [call.dim(call["dim"])])


def _along(call: Call) -> Rule:
    """Along one dim, and not linear."""
    return same_dims(call, [call.dim(call["dim"])], (), Saved((0,), output=True))


def _gated(call: Call) -> Rule:
    """One half of a dim by the other."""
    return same_dims(call, [call.dim(call["dim"])], (), Saved((0,)))


def _values_and_places(call: Call, inputs: tuple[int, ...] = ()) -> Rule:
    """Values along one dim and where they stand: two results, of which backward keeps places."""
    rule = same_dims(call, [call.dim(call["dim"])], ())
    (out,) = rule.outputs
    saved = Saved(inputs, extra=(Extra(out, torch.int64),))
    text = render(rule.inputs, (out, out), rule.whole)
    return replace(rule, outputs=(out, out), text=text, saved=saved)


def _whole_dims(call: Call) -> Rule:
    dims = call["dims"] or range(len(call.shape))
    return same_dims(call, [call.dim(dim) for dim in dims])


def _transform(call: Call) -> Rule | None:
    """Fourier transforms mix all elements of their dims."""
    dims = range(len(call.shape)) if call["dim"] is None else call["dim"]
    if call.get("s", call.get("n")) is not None:
        return None  # cuts or pads first
    return same_dims(call, [call.dim(dim) for dim in ([dims] if isinstance(dims, int) else dims)])


def _transform_of_real(call: Call) -> Rule | None:
    """Those that take real numbers as they are, and keep them."""
    rule = _transform(call)
    is_real = not info(call.inputs[0]).val.is_complex()
    return replace(rule, saved=Saved((0,))) if rule is not None and is_real else rule


def _triangle(call: Call) -> Rule:
    return same_dims(call, [len(call.shape) - 2, len(call.shape) - 1])


def _diff(call: Call) -> Rule:
    dim = call.dim(call["dim"])
    out = names(len(call.shape))
    sizes = sizes_of(out, call.shape)
    inputs = []
    for index, shape in enumerate(call.shapes):
        sizes[f"n{index}"] = shape[dim]
        inputs.append([(f"n{index}",) if i == dim else factor for i, factor in enumerate(out)])
    whole = [f"d{dim}", *(f"n{index}" for index in range(len(inputs)))]
    return call.rule(inputs, out, sizes, whole=whole, passes=[range(len(inputs))])


register_rule(aten("flatten ravel view_as reshape_as"), _reshape)
register_rule("aten.reshape", _reshape, traits=Traits(view=_in_order, shape="shape"))
register_rule("aten.unsqueeze", _reshape, traits=VIEW)
register_rule(aten("view unflatten squeeze"), _reshape, traits=Traits(view=True, as_reshape=True))
register_rule("aten._unsafe_view", _reshape, traits=Traits(as_reshape=True))
register_rule(aten("transpose.int t"), _transpose, traits=VIEW)
register_rule(aten("swapaxes swapdims"), _transpose)
register_rule(aten("mT adjoint matrix_H"), _last_two_swapped)
register_rule("aten.permute", _permute, traits=VIEW)
register_rule("aten.movedim", _movedim)
register_rule("aten.expand", _expand, traits=Traits(view=True, shape="size"))
register_rule("aten.expand_as", "..., ... -> ...", passes=[(0,)], cost=0)
register_rule("aten.repeat", _repeat)
register_rule("aten.repeat_interleave.self_int", _repeat_interleave)
register_rule("aten.cat", _concatenate)
register_rule("aten.stack", _stack)
register_rule(aten("pad constant_pad_nd"), _pad)
register_rule("aten.cumsum", _whole_dim)
register_rule(aten("argsort cumprod logcumsumexp"), _along)
register_rule("aten.glu", _gated)
register_rule(aten("topk sort"), _values_and_places)
register_rule(aten("cummax cummin"), partial(_values_and_places, inputs=(0,)))
register_rule(aten("flip roll"), _whole_dims)
register_rule(
    aten("fft_irfft fft_fft2 fft_ifft2 fft_irfft2 fft_fftn fft_ifftn fft_irfftn"), _transform
)
register_rule(aten("fft_fft fft_ifft fft_rfft fft_rfft2 fft_rfftn"), _transform_of_real)
register_rule("aten.view_as_real", "... -> ... two!", passes="all", cost=0)
register_rule("aten.view_as_complex", "... two! -> ...", passes="all", cost=0)
register_rule("aten.channel_shuffle", "... c! h! w! -> ... c! h! w!", passes="all", cost=0)
register_rule("aten.pixel_shuffle", "... c! h! w! -> ... p! y! x!", passes="all", cost=0)
register_rule("aten.pixel_unshuffle", "... c! h! w! -> ... p! y! x!", passes="all", cost=0)
register_rule(aten("tril triu"), _triangle)
register_rule("aten.diff", _diff)
