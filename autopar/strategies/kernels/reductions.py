"""Reductions over a dim in pieces: each rank reduces its own, and all combine what these give.

    norm(x)  =  norm(norms of the pieces)          max(x)  =  max(maxima of the pieces)

What a piece gives stands in one or more columns: the deviation needs the mean of each piece, and a
largest element shares its gradient with all that are as large. Backward needs no message: how the
result follows from one's own columns is found in forward, and how these follow from the piece is
torch's own gradient. Softmax is here, too, whose rows have one sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.collectives.together import Gather, Group, JointKernel, Steps, Sum, Traffic

Arguments = Mapping[str, Any]
# The columns of a piece, from its elements, the dims and the arguments.
Reduce = Callable[[Tensor, list[int], Arguments], list[Tensor]]
# The result from the columns of all pieces [members, ...], and the number of elements of each.
Combine = Callable[[list[Tensor], Sequence[int], Arguments], Tensor]


def _kernel(name: str, reduce: Reduce, combine: Combine, columns: int = 1) -> JointKernel:
    """The kernel of an operator whose columns are reduced and combined so."""

    def forward(group: Group, self: Tensor, **arguments: Any) -> Steps:
        dims = dims_of(self, arguments)
        own = torch.stack(reduce(_wide(self, arguments), dims, arguments))
        parts = torch.stack((yield (yield Gather(own))))
        differs = parts.is_floating_point()
        with torch.enable_grad():
            read = parts.detach().requires_grad_(differs)
            out = combine([*read.unbind(1)], _counts(group, self, dims), arguments)
        saved: tuple[Tensor, ...] = ()
        if differs:
            (slopes,) = torch.autograd.grad(out, read, torch.ones_like(out))
            saved = self, slopes[group.index]
        out = out.detach()
        shaped = out if arguments.get("keepdim") else out.squeeze(dims)
        dtype = arguments.get("dtype") or self.dtype
        return (shaped.to(dtype) if differs else shaped,), saved, arguments

    def backward(
        group: Group, saved: Sequence[Tensor], arguments: Arguments, grad: Tensor
    ) -> Steps:
        yield from ()
        x, slopes = saved
        dims = dims_of(x, arguments)
        if not arguments.get("keepdim"):
            for dim in sorted(dims):
                grad = grad.unsqueeze(dim)
        if not x.numel():
            return (torch.zeros_like(x),)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            own = torch.stack(reduce(_wide(leaf, arguments), dims, arguments))
        return torch.autograd.grad(own, leaf, slopes * grad, materialize_grads=True)

    forward.__name__ = forward.__qualname__ = f"cut_{name}"
    return JointKernel(forward, backward, partial(_traffic, columns))


def _traffic(
    columns: int,
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
) -> Traffic:
    """The columns of all ranks."""
    return Traffic((("all_gather", columns * count * outputs[0]),), (), (2, 1))


def dims_of(x: Tensor, arguments: Arguments) -> list[int]:
    """Those that are reduced: all, where none is named."""
    given = arguments.get("dim")
    named = [given] if isinstance(given, int) else given or range(x.ndim)
    return [dim % x.ndim for dim in named]


def _wide(x: Tensor, arguments: Arguments) -> Tensor:
    """In a dtype that holds sums and counts."""
    dtype = arguments.get("dtype") or x.dtype
    return x.to(torch.promote_types(dtype, torch.float32)) if dtype.is_floating_point else x


def _counts(group: Group, x: Tensor, dims: list[int]) -> list[int]:
    """The elements of each piece that make one of the result."""
    cut = group.input(0)
    beside = math.prod(x.shape[dim] for dim in dims if dim != cut.dim)
    return [beside * length for length in cut.lengths]


def _filled(x: Tensor, dims: list[int], value: float) -> Tensor:
    """What a piece without elements gives."""
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return x.new_full(shape, value)


def _is_empty(x: Tensor, dims: list[int]) -> bool:
    return any(x.shape[dim] == 0 for dim in dims)


# Deviations, norms, sums of exponentials, products.


def _spread(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    """The mean, and the norm of what deviates from it."""
    if _is_empty(x, dims):
        return [_filled(x, dims, 0)] * 2
    mean = x.mean(dims, keepdim=True)
    return [mean, torch.linalg.vector_norm(x - mean, 2, dims, keepdim=True)]


def _deviation(columns: list[Tensor], counts: Sequence[int], arguments: Arguments) -> Tensor:
    means, norms = columns
    weights = means.new_tensor(counts).view(-1, *(1,) * (means.ndim - 1))
    apart = means - (means * weights).sum(0) / sum(counts)
    norm = torch.linalg.vector_norm(torch.cat((norms, apart * weights.sqrt())), 2, 0)
    return norm / math.sqrt(sum(counts) - correction_of(arguments))


def _variance(columns: list[Tensor], counts: Sequence[int], arguments: Arguments) -> Tensor:
    return _deviation(columns, counts, arguments).square()


def correction_of(arguments: Arguments) -> float:
    """What is taken off the number of elements: one, where nothing is said."""
    if "unbiased" in arguments:
        return float(arguments["unbiased"])
    given = arguments["correction"]
    return 1.0 if given is None else float(given)


def _norm(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    order = arguments["ord"]
    if _is_empty(x, dims):
        norm = _filled(x, dims, math.inf if order < 0 else 0)
    else:
        norm = torch.linalg.vector_norm(x, order, dims, keepdim=True)
    if not math.isinf(order):
        return [norm, torch.zeros_like(norm)]
    return [norm, _ties(x.abs(), norm, dims)]


def _norm_of_norms(columns: list[Tensor], counts: Sequence[int], arguments: Arguments) -> Tensor:
    norms, ties = columns
    order = arguments["ord"]
    if math.isinf(order):
        return _Extreme.apply(norms, ties, order > 0)
    return torch.linalg.vector_norm(norms, order or 1, 0)


def _exponentials(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    return [_filled(x, dims, -math.inf) if _is_empty(x, dims) else x.logsumexp(dims, keepdim=True)]


def _log_of_sum(columns: list[Tensor], counts: Sequence[int], arguments: Arguments) -> Tensor:
    return columns[0].logsumexp(0)


def _product(x: Tensor, dims: list[int], arguments: Arguments) -> list[Tensor]:
    if len(dims) == x.ndim:
        return [x.prod().view([1] * x.ndim)]
    (dim,) = dims
    return [x.prod(dim, keepdim=True)]


def _product_of_products(
    columns: list[Tensor], counts: Sequence[int], arguments: Arguments
) -> Tensor:
    return columns[0].prod(0)


# The largest and the smallest.


def _extreme(
    x: Tensor, dims: list[int], arguments: Arguments, is_max: bool, of_all: bool
) -> list[Tensor]:
    if _is_empty(x, dims):
        least, most = -math.inf, math.inf
        if not x.is_floating_point():
            least, most = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
        found = _filled(x, dims, least if is_max else most)
        return [found, torch.zeros_like(found)]
    if of_all:
        found = (x.max() if is_max else x.min()).view([1] * x.ndim)
        return [found, _ties(x, found, dims)]
    found = x.amax(dims, keepdim=True) if is_max else x.amin(dims, keepdim=True)
    return [found, (x == found).sum(dims, keepdim=True).to(x.dtype)]


def _ties(x: Tensor, found: Tensor, dims: list[int]) -> Tensor:
    """How many elements are as large; what is no number is as large as another such."""
    equal = (x == found) | (x.isnan() & found.isnan())
    return equal.sum(dims, keepdim=True).to(x.dtype)


def _most(
    columns: list[Tensor], counts: Sequence[int], arguments: Arguments, is_max: bool
) -> Tensor:
    return _Extreme.apply(*columns, is_max)


class _Extreme(torch.autograd.Function):
    """The largest or smallest of what pieces give, whose gradient goes to all elements that are as
    large alike: to each piece by how many it has, of which it gives each the same."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ties: Tensor, is_max: bool) -> Tensor:
        found = values.amax(0) if is_max else values.amin(0)
        here = (values == found) | (values.isnan() & found.isnan())
        ctx.save_for_backward(ties * here)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ties,) = ctx.saved_tensors
        return grad * ties / ties.sum(0), None, None


REDUCTIONS = (
    _kernel("std", _spread, _deviation, 2),
    _kernel("var", _spread, _variance, 2),
    _kernel("norm", _norm, _norm_of_norms, 2),
    _kernel("logsumexp", _exponentials, _log_of_sum),
    _kernel("prod", _product, _product_of_products),
    *(
        _kernel(
            name,
            partial(_extreme, is_max="max" in name, of_all=not name.startswith("a")),
            partial(_most, is_max="max" in name),
            2,
        )
        for name in ("amax", "amin", "max", "min")
    ),
)


# Softmax.


def cut_softmax(
    group: Group,
    self: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    half_to_float: bool = False,
) -> Steps:
    """The largest of all pieces first, then the sum of the exponentials."""
    dtype = torch.float32 if half_to_float else dtype
    exponentials, total, _ = yield from _exponentiated(self, dim, dtype)
    out = (exponentials / total).to(dtype or self.dtype)
    return (out,), (out,), (dim, self.dtype)


def cut_log_softmax(
    group: Group,
    self: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    half_to_float: bool = False,
) -> Steps:
    """The same, as logarithms."""
    dtype = torch.float32 if half_to_float else dtype
    _, total, shifted = yield from _exponentiated(self, dim, dtype)
    out = (shifted - total.log()).to(dtype or self.dtype)
    return (out,), (out,), (dim, self.dtype)


def _exponentiated(x: Tensor, dim: int, dtype: torch.dtype | None) -> Steps:
    wide = _wide(x, {"dtype": dtype})
    most = _filled(wide, [dim % x.ndim], -math.inf)
    if x.shape[dim]:
        most = wide.amax(dim, keepdim=True)
    found = yield (yield Gather(most))
    shifted = wide - torch.stack(found).amax(0)
    exponentials = shifted.exp()
    (total,) = yield (yield Sum(exponentials.sum(dim, keepdim=True)))
    return exponentials, total, shifted


def cut_softmax_backward(
    group: Group, saved: Sequence[Tensor], rest: tuple[int, torch.dtype], grad: Tensor
) -> Steps:
    """What all elements of a row have in common is one sum."""
    (out,), (dim, dtype) = saved, rest
    slope = _wide(grad * out, {})
    (common,) = yield (yield Sum(slope.sum(dim, keepdim=True)))
    return ((slope - out * common).to(dtype),)


def cut_log_softmax_backward(
    group: Group, saved: Sequence[Tensor], rest: tuple[int, torch.dtype], grad: Tensor
) -> Steps:
    """As above, for which the probabilities are made again."""
    (out,), (dim, dtype) = saved, rest
    wide = _wide(grad, {})
    (total,) = yield (yield Sum(wide.sum(dim, keepdim=True)))
    return ((wide - out.exp() * total).to(dtype),)


def _traffic_of_rows(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
) -> Traffic:
    """A number of each rank for each row, then a sum; one sum in backward."""
    return Traffic(
        (("all_gather", count * inputs[0]), ("all_reduce", inputs[0])),
        (("all_reduce", inputs[0]),),
        (2, 1),
    )


SOFTMAXES = (
    JointKernel(cut_softmax, cut_softmax_backward, _traffic_of_rows),
    JointKernel(cut_log_softmax, cut_log_softmax_backward, _traffic_of_rows),
)
