"""Reductions over a dim in pieces: each rank reduces its piece, and all combine the results.

    norm(x)  =  norm(norms of the pieces)          max(x)  =  max(maxima of the pieces)

A piece gives one or more columns: the deviation needs the mean of each piece, and a largest element
shares its gradient with all that are as large. All pieces combine to the result, and to numbers for
backward, which needs no message: it uses torch's formulas, also for infinite numbers and NaN.
Softmax is here, too, whose rows have one sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import (
    AllGather,
    AllReduce,
    CommVolume,
    JointKernel,
    KernelGroup,
    Steps,
)

Arguments = Mapping[str, Any]
# The columns of a piece, from its elements, the dims and the arguments.
Reduce = Callable[[Tensor, list[int], Arguments], list[Tensor]]
# The result, and further tensors for backward, from the columns of all pieces [members, ...], the
# number of elements of each, and the index of the local piece.
Combine = Callable[[list[Tensor], Sequence[int], int, Arguments], tuple[Tensor, ...]]
# The gradient of a piece, from that of the result, the piece, the combined tensors, and the number
# of all elements.
Slope = Callable[[Tensor, Tensor, Sequence[Tensor], int, Arguments], Tensor]


def _kernel(
    name: str, reduce: Reduce, combine: Combine, slope: Slope, columns: int = 1
) -> JointKernel:
    """Return the kernel of a reduction, with so many columns a piece."""

    def forward(group: KernelGroup, self: Tensor, **arguments: Any) -> Steps:
        dims = dims_of(self, arguments)
        local = torch.stack(reduce(_wide(self, arguments), dims, arguments))
        parts = torch.stack((yield (yield AllGather(local))))
        counts = _counts(group, self, dims)
        combined = combine([*parts.unbind(1)], counts, group.index, arguments)
        differs = self.is_floating_point()
        shaped = combined[0] if arguments.get("keepdim") else combined[0].squeeze(dims)
        dtype = arguments.get("dtype") or self.dtype
        rest = arguments, sum(counts)
        return (
            (shaped.to(dtype) if differs else shaped,),
            (self, *combined) if differs else (),
            rest,
        )

    def backward(
        group: KernelGroup, saved: Sequence[Tensor], rest: tuple[Arguments, int], grad: Tensor
    ) -> Steps:
        yield from ()
        (x, *combined), (arguments, count) = saved, rest
        if not arguments.get("keepdim"):
            for dim in sorted(dims_of(x, arguments)):
                grad = grad.unsqueeze(dim)
        wide = _wide(x, arguments)
        return (slope(grad.to(wide.dtype), wide, combined, count, arguments).to(x.dtype),)

    forward.__name__ = forward.__qualname__ = f"cut_{name}"
    return JointKernel(forward, backward, partial(_traffic, columns), is_wide=True)


def _traffic(
    columns: int,
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
) -> CommVolume:
    """Return the traffic: the columns of all ranks."""
    return CommVolume((("all_gather", columns * count * outputs[0]),), (), (2, 1))


def dims_of(x: Tensor, arguments: Arguments) -> list[int]:
    """Return the dims that are reduced: all, where none is named."""
    dims = arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.ndim)
    return [dim % x.ndim for dim in dims]


def _wide(x: Tensor, arguments: Arguments) -> Tensor:
    """Return x in a dtype that holds sums and counts."""
    dtype = arguments.get("dtype") or x.dtype
    return x.to(torch.promote_types(dtype, torch.float32)) if dtype.is_floating_point else x


def _counts(group: KernelGroup, x: Tensor, dims: list[int]) -> list[int]:
    """Return how many elements of each piece are reduced to one."""
    cut = group.input(0)
    uncut = math.prod(x.shape[dim] for dim in dims if dim != cut.dim)
    return [uncut * length for length in cut.lengths]


def _filled(x: Tensor, dims: list[int], value: float) -> Tensor:
    """Return the column of a piece without elements."""
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return x.new_full(shape, value)


def _is_empty(x: Tensor, dims: list[int]) -> bool:
    return any(x.shape[dim] == 0 for dim in dims)


# Deviations, norms, sums of exponentials, products.


def _spread(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    """Return the mean, and the norm of the deviations from it."""
    if _is_empty(x, dims):
        return [_filled(x, dims, 0)] * 2
    mean = x.mean(dims, keepdim=True)
    return [mean, torch.linalg.vector_norm(x - mean, 2, dims, keepdim=True)]


def _deviation(
    columns: list[Tensor], counts: Sequence[int], index: int, arguments: Arguments
) -> tuple[Tensor, ...]:
    """Return the deviation and the mean of all pieces."""
    means, norms = columns
    weights = means.new_tensor(counts).view(-1, *(1,) * (means.ndim - 1))
    mean = (means * weights).sum(0) / sum(counts)
    apart = (means - mean) * weights.sqrt()
    norm = torch.linalg.vector_norm(torch.cat((norms, apart)), 2, 0)
    return norm / math.sqrt(sum(counts) - correction_of(arguments)), mean


def _variance(
    columns: list[Tensor], counts: Sequence[int], index: int, arguments: Arguments
) -> tuple[Tensor, ...]:
    deviation, mean = _deviation(columns, counts, index, arguments)
    return deviation.square(), mean


def _slope_of_variance(
    grad: Tensor, x: Tensor, combined: Sequence[Tensor], count: int, arguments: Arguments
) -> Tensor:
    return 2 / (count - correction_of(arguments)) * grad * (x - combined[1])


def _slope_of_deviation(
    grad: Tensor, x: Tensor, combined: Sequence[Tensor], count: int, arguments: Arguments
) -> Tensor:
    grad = (grad / (2 * combined[0])).masked_fill(combined[0] == 0, 0)
    return _slope_of_variance(grad, x, combined, count, arguments)


def correction_of(arguments: Arguments) -> float:
    """Return the number that is subtracted from the number of elements; by default one."""
    if "unbiased" in arguments:
        return float(arguments["unbiased"])
    correction = arguments["correction"]
    return 1.0 if correction is None else float(correction)


def _norm(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    order = arguments["ord"]
    if _is_empty(x, dims):
        norm = _filled(x, dims, math.inf if order < 0 else 0)
    else:
        norm = torch.linalg.vector_norm(x, order, dims, keepdim=True)
    if not math.isinf(order):
        return [norm, torch.zeros_like(norm)]
    return [norm, _ties(x.abs(), norm, dims)]


def _norm_of_norms(
    columns: list[Tensor], counts: Sequence[int], index: int, arguments: Arguments
) -> tuple[Tensor, ...]:
    order = arguments["ord"]
    if math.isinf(order):
        return _combined_extreme(columns, counts, index, arguments, is_max=order > 0)
    return (torch.linalg.vector_norm(columns[0], order or 1, 0),)


def _slope_of_norm(
    grad: Tensor, x: Tensor, combined: Sequence[Tensor], count: int, arguments: Arguments
) -> Tensor:
    order, norm = arguments["ord"], combined[0]
    if order == 0:
        return torch.zeros_like(x)
    if math.isinf(order):
        return x.sgn() * _slope_of_extreme(grad, x.abs(), combined, count, arguments)
    if order == 1:
        return x.sgn() * grad
    if order == 2:
        return grad * (x / norm).masked_fill(norm == 0, 0)
    if order < 1:
        powers = x.sgn() * x.abs().pow(order - 1).masked_fill(x == 0, 0)
        return powers * grad * norm.pow(1 - order)
    powers = x.sgn() * x.abs().pow(order - 1) if order < 2 else x * x.abs().pow(order - 2)
    return powers * (grad / norm.pow(order - 1)).masked_fill(norm == 0, 0)


def _exponentials(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    return [_filled(x, dims, -math.inf) if _is_empty(x, dims) else x.logsumexp(dims, keepdim=True)]


def _log_of_sum(
    columns: list[Tensor], counts: Sequence[int], index: int, arguments: Arguments
) -> tuple[Tensor, ...]:
    return (columns[0].logsumexp(0),)


def _slope_of_log(
    grad: Tensor, x: Tensor, combined: Sequence[Tensor], count: int, arguments: Arguments
) -> Tensor:
    return grad * (x - combined[0]).exp()


def _product(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    if len(dims) == x.ndim:
        return [x.prod().view([1] * x.ndim)]
    (dim,) = dims
    return [x.prod(dim, keepdim=True)]


def _product_of_products(
    columns: list[Tensor], counts: Sequence[int], index: int, arguments: Arguments
) -> tuple[Tensor, ...]:
    """Return the product of all pieces, and the product of the others."""
    (products,) = columns
    others = torch.cat((products[:index], products[index + 1 :]))
    return products.prod(0), others.prod(0)


def _slope_of_product(
    grad: Tensor, x: Tensor, combined: Sequence[Tensor], count: int, arguments: Arguments
) -> Tensor:
    """Return the gradient of a product.

    Where it is zero, it cannot be divided by an element: there the others' product is multiplied
    by the gradient of the local product.
    """
    whole, others = combined
    if not x.numel():
        return torch.zeros_like(x)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (local,) = _product(leaf, dims_of(x, arguments), arguments)
    (undivided,) = torch.autograd.grad(local, leaf, grad * others)
    return torch.where(whole == 0, undivided, grad * (whole / x))


# The largest and the smallest.


def _extreme(
    x: Tensor, dims: list[int], arguments: Arguments, *, is_max: bool, of_all: bool
) -> list[Tensor]:
    if _is_empty(x, dims):
        least, most = -math.inf, math.inf
        if not x.is_floating_point():
            least, most = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
        extreme = _filled(x, dims, least if is_max else most)
        return [extreme, torch.zeros_like(extreme)]
    if of_all:
        extreme = (x.max() if is_max else x.min()).view([1] * x.ndim)
    else:
        extreme = x.amax(dims, keepdim=True) if is_max else x.amin(dims, keepdim=True)
    return [extreme, _ties(x, extreme, dims, of_all=of_all)]


def _equal(x: Tensor, extreme: Tensor, *, of_all: bool) -> Tensor:
    """Return where x is the extreme; for that `of_all` elements NaN equals NaN, as in torch."""
    equal = x == extreme
    return equal | (x.isnan() & extreme.isnan()) if of_all else equal


def _ties(x: Tensor, extreme: Tensor, dims: list[int], *, of_all: bool = True) -> Tensor:
    """Return how many elements equal the extreme."""
    return _equal(x, extreme, of_all=of_all).sum(dims, keepdim=True).to(x.dtype)


def _combined_extreme(
    columns: list[Tensor],
    counts: Sequence[int],
    index: int,
    arguments: Arguments,
    *,
    is_max: bool,
) -> tuple[Tensor, ...]:
    """Return the extreme of all pieces, and how many elements equal it."""
    values, ties = columns
    extreme = values.amax(0) if is_max else values.amin(0)
    return extreme, (ties * _equal(values, extreme, of_all=True)).sum(0)


def _slope_of_extreme(
    grad: Tensor,
    x: Tensor,
    combined: Sequence[Tensor],
    count: int,
    arguments: Arguments,
    *,
    of_all: bool = True,
) -> Tensor:
    """Return the gradient of an extreme, which elements that equal it share."""
    extreme, ties = combined
    return grad * _equal(x, extreme, of_all=of_all) / ties


REDUCTIONS = (
    _kernel("std", _spread, _deviation, _slope_of_deviation, 2),
    _kernel("var", _spread, _variance, _slope_of_variance, 2),
    _kernel("norm", _norm, _norm_of_norms, _slope_of_norm, 2),
    _kernel("logsumexp", _exponentials, _log_of_sum, _slope_of_log),
    _kernel("prod", _product, _product_of_products, _slope_of_product),
    *(
        _kernel(
            name,
            partial(_extreme, is_max="max" in name, of_all=not name.startswith("a")),
            partial(_combined_extreme, is_max="max" in name),
            partial(_slope_of_extreme, of_all=not name.startswith("a")),
            2,
        )
        for name in ("amax", "amin", "max", "min")
    ),
)


# Softmax.


def cut_softmax(
    group: KernelGroup,
    self: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    half_to_float: bool = False,
) -> Steps:
    """Return the softmax: pieces share their largest elements, then the sum of exponentials."""
    dtype = torch.float32 if half_to_float else dtype
    exponentials, total, _ = yield from _exponentiated(self, dim, dtype)
    out = (exponentials / total).to(dtype or self.dtype)
    return (out,), (out,), (dim, self.dtype)


def cut_log_softmax(
    group: KernelGroup,
    self: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    half_to_float: bool = False,
) -> Steps:
    """Return the logarithm of the softmax."""
    dtype = torch.float32 if half_to_float else dtype
    _, total, shifted = yield from _exponentiated(self, dim, dtype)
    out = (shifted - total.log()).to(dtype or self.dtype)
    return (out,), (out,), (dim, self.dtype)


def _exponentiated(x: Tensor, dim: int, dtype: torch.dtype | None) -> Steps:
    wide = _wide(x, {"dtype": dtype})
    most = _filled(wide, [dim % x.ndim], -math.inf)
    if x.shape[dim]:
        most = wide.amax(dim, keepdim=True)
    maxima = yield (yield AllGather(most))
    shifted = wide - torch.stack(maxima).amax(0)
    exponentials = shifted.exp()
    (total,) = yield (yield AllReduce(exponentials.sum(dim, keepdim=True)))
    return exponentials, total, shifted


def cut_softmax_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: tuple[int, torch.dtype], grad: Tensor
) -> Steps:
    """Return the gradient of a softmax; the elements of a row share one sum."""
    (out,), (dim, dtype) = saved, rest
    slope = _wide(grad * out, {})
    (common,) = yield (yield AllReduce(slope.sum(dim, keepdim=True)))
    return ((slope - out * common).to(dtype),)


def cut_log_softmax_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: tuple[int, torch.dtype], grad: Tensor
) -> Steps:
    """Return the gradient of a log-softmax, which computes the probabilities again."""
    (out,), (dim, dtype) = saved, rest
    wide = _wide(grad, {})
    (total,) = yield (yield AllReduce(wide.sum(dim, keepdim=True)))
    return ((wide - out.exp() * total).to(dtype),)


def _traffic_of_rows(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
) -> CommVolume:
    """Return the traffic: a number a rank and row, then a sum; one sum in backward."""
    return CommVolume(
        (("all_gather", count * outputs[0]), ("all_reduce", outputs[0])),
        (("all_reduce", outputs[0]),),
        (2, 1),
    )


SOFTMAXES = (
    JointKernel(cut_softmax, cut_softmax_backward, _traffic_of_rows, is_wide=True),
    JointKernel(cut_log_softmax, cut_log_softmax_backward, _traffic_of_rows, is_wide=True),
)
