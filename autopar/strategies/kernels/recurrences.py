"""Linear recurrences along a dim, of states that carry over:

    h[t] = a[t] * h[t - 1] + b[t],    h[-1] = start, or zero

    h = linear_scan(a, b, start, dim)        a, b and h of one shape, start without the dim

Two steps are one step of a recurrence of half the length: the number of calls is logarithmic. The
gradient is a recurrence that runs backwards: with v[t] = a[t] * (grad[t] + v[t + 1]) each b gets
grad[t] + v[t + 1], and each a this times the state before. Ranks with pieces of the dim compute
states from zero, and share the product of their factors and their last state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import AllGather, CommVolume, JointKernel, KernelGroup, Steps


def scan_states(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Return all states along the first dim."""
    if not len(b):
        return b.clone()
    if start is not None:
        b = torch.cat([torch.addcmul(b[:1], a[:1], start), b[1:]])
    return _from_nothing(a, b)


def _from_nothing(a: Tensor, b: Tensor) -> Tensor:
    if len(b) == 1:
        return b.clone()
    pairs = len(b) // 2
    earlier, later = slice(0, 2 * pairs, 2), slice(1, None, 2)
    odd = _from_nothing(a[earlier] * a[later], torch.addcmul(b[later], a[later], b[earlier]))
    rest = slice(2, None, 2)
    even = torch.addcmul(b[rest], a[rest], odd[: len(b) - 1 - pairs])
    out = torch.empty_like(b)
    out[0], out[later], out[rest] = b[0], odd, even
    return out


def linear_scan(a: Tensor, b: Tensor, start: Tensor | None = None, dim: int = -1) -> Tensor:
    """Return all states of a recurrence along `dim`; `start` None: zero."""
    return LINEAR_SCAN(a, b, start, dim)


def _along(dim: int, x: Tensor) -> Tensor:
    """Return x with `dim` in front, in the dtype in which states are added."""
    return _wide(x.movedim(dim, 0))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _run(a: Tensor, b: Tensor, start: Tensor | None = None, dim: int = -1) -> Tensor:
    start = None if start is None else _wide(start)
    return _back(scan_states(_along(dim, a), _along(dim, b), start), dim, b)


def _back(rows: Tensor, dim: int, like: Tensor) -> Tensor:
    return rows.to(like.dtype).movedim(0, dim).contiguous()


def _fake(a: Tensor, b: Tensor, start: Tensor | None = None, dim: int = -1) -> Tensor:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise RuntimeError(
            f"factors and terms of a recurrence are of one shape and dtype, not {[*a.shape]} of "
            f"{a.dtype} and {[*b.shape]} of {b.dtype}"
        )
    row = b.select(dim, 0).shape if b.shape[dim] else start.shape if start is not None else ()
    if start is not None and (start.shape != row or start.dtype != b.dtype):
        raise RuntimeError(
            f"the start of a recurrence is one state, {[*row]} of {b.dtype}, not {[*start.shape]} "
            f"of {start.dtype}"
        )
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, start, ctx.dim = inputs
    ctx.save_for_backward(a, output, start)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, h, start = ctx.saved_tensors
    dim, row = ctx.dim, grad.narrow(ctx.dim, 0, min(1, grad.shape[ctx.dim]))
    none = torch.zeros_like(row)
    back = LINEAR_SCAN(a.conj().flip(dim), (a.conj() * grad).flip(dim), None, dim).flip(dim)
    of_b = grad + _moved(back, none, dim, 1)
    before = none if start is None else start.unsqueeze(dim)
    of_a = of_b * _moved(h, before, dim, -1).conj()
    of_start = None if start is None else back.narrow(dim, 0, 1).squeeze(dim)
    return of_a, of_b, of_start, None


def _moved(x: Tensor, row: Tensor, dim: int, by: int) -> Tensor:
    """Return x moved by one along a dim, with `row` in the place that becomes free."""
    length = x.shape[dim]
    if not length:
        return x
    inner = x.narrow(dim, max(by, 0), length - 1)
    return torch.cat([inner, row] if by > 0 else [row, inner], dim)


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("linear_scan(Tensor a, Tensor b, Tensor? start=None, int dim=-1) -> Tensor")
_library.impl("linear_scan", _run, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::linear_scan", _fake, lib=_library)
torch.library.register_autograd(
    "autopar::linear_scan", _gradients, setup_context=_keep, lib=_library
)
LINEAR_SCAN = torch.ops.autopar.linear_scan.default


def cut_linear_scan(
    group: KernelGroup, a: Tensor, b: Tensor, start: Tensor | None = None, dim: int = -1
) -> Steps:
    """Return the states of a piece, to which the last state before it is carried."""
    first = None if group.index or start is None else _wide(start)
    rows, before = yield from _carried(group.index, _along(dim, a), _along(dim, b), first)
    h = _back(rows, dim, b)
    return (h,), (a, h, before.to(b.dtype)), (dim, start is not None)


def cut_linear_scan_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: tuple[int, bool], grad: Tensor
) -> Steps:
    """Return the gradients: a scan of the pieces in reverse."""
    (a, h, before), (dim, has_start) = saved, rest
    factors, slopes = _along(dim, a).conj(), _along(dim, grad)
    index = group.count - 1 - group.index
    back, behind = yield from _carried(
        index, factors.flip(0), (factors * slopes).flip(0), is_reversed=True
    )
    back = back.flip(0)
    of_b = slopes + _moved(back, behind[None], 0, 1)
    of_a = of_b * _moved(_along(dim, h), _wide(before)[None], 0, -1).conj()
    gradients = _back(of_a, dim, a), _back(of_b, dim, a)
    if not has_start:
        return gradients
    is_first = not group.index and len(back)
    return *gradients, (back[0] if is_first else torch.zeros_like(behind)).to(a.dtype)


def _carried(
    index: int, a: Tensor, b: Tensor, start: Tensor | None = None, *, is_reversed: bool = False
) -> Steps:
    """Return the states of piece `index` along the first dim, and the state before it."""
    h = scan_states(a, b, start)
    last = h[-1] if len(h) else h.new_zeros(h.shape[1:])
    totals = yield (yield AllGather(torch.stack([a.prod(0), last])))
    before = torch.zeros_like(last) if start is None else start
    if index:
        for factor, end in (totals[::-1] if is_reversed else totals)[:index]:
            before = torch.addcmul(end, factor, before)
        h.addcmul_(a.cumprod(0), before)
    return h, before


def _traffic(
    count: int, inputs: Sequence[float], outputs: Sequence[float], needs: Sequence[bool]
) -> CommVolume:
    """Return the traffic: two rows of each rank."""
    once = (("all_gather", 2 * count * outputs[0]),)
    return CommVolume(once, once, (2, 2))


SCAN = JointKernel(cut_linear_scan, cut_linear_scan_backward, _traffic, is_wide=True)
