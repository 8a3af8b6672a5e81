"""Products in steps around an axis, each step's product beside the next step's message.

`gathered_product` is the linear operator whose rows are cut, as its weight's are, and whose output
is cut by the weight's: what an all-gather before it would bring arrives piece by piece.
`scattered_product` sums over a cut dim, and leaves each rank some rows of the sum: the sums travel,
each rank adding its term, as the reduce-scatter after it would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import (
    CommVolume,
    ExtraPiece,
    JointKernel,
    KernelGroup,
    RingShift,
    Steps,
)

ROWS = -2  # the dim that travels


def gathered_product(group: KernelGroup, input: Tensor, weight: Tensor, bias: None = None) -> Steps:
    """Rows of all members times one's own columns."""
    lengths = group.input(0).lengths
    out = input.new_empty(*input.shape[:ROWS], sum(lengths), weight.shape[0])
    rows = out.split(lengths, ROWS)
    yield from _around(group, lengths, input, lambda at, x: _into(rows[at], x, weight.t()))
    return (out,), (input, weight), None


def gathered_product_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: None, grad: Tensor
) -> Steps:
    """The rows come by once more, for the weight; the sums of their gradients come home."""
    input, weight = saved
    lengths = group.input(0).lengths
    rows, of_weight = grad.split(lengths, ROWS), torch.empty_like(weight)

    def add(at: int, x: Tensor) -> None:
        _add_product(of_weight, rows[at], x, at == group.index)

    of_input = None
    if group.needs[1]:
        yield from _around(group, lengths, input, add)
    if group.needs[0]:
        of_input = yield from _homeward(group, lengths, lambda at: rows[at] @ weight.conj())
    return of_input, of_weight if group.needs[1] else None


def scattered_product(
    group: KernelGroup, input: Tensor, weight: Tensor, bias: None = None
) -> Steps:
    """Of the sum of all members' products one's own rows."""
    lengths = group.output().lengths
    rows = input.split(lengths, ROWS)
    out = yield from _homeward(group, lengths, lambda at: rows[at] @ weight.t())
    return (out,), (input, weight), None


def scattered_product_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: None, grad: Tensor
) -> Steps:
    """The gradients of all rows come by."""
    input, weight = saved
    lengths = group.output().lengths
    rows, of_weight = input.split(lengths, ROWS), torch.empty_like(weight)
    of_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    parts = of_input.split(lengths, ROWS)

    def add(at: int, g: Tensor) -> None:
        if group.needs[0]:
            _into(parts[at], g, weight.conj())
        if group.needs[1]:
            _add_product(of_weight, g, rows[at], at == group.index)

    yield from _around(group, lengths, grad.contiguous(), add)
    return of_input if group.needs[0] else None, of_weight if group.needs[1] else None


def _around(
    group: KernelGroup, lengths: Sequence[int], own: Tensor, use: Callable[[int, Tensor], None]
) -> Steps:
    """Each member's rows come by, one's own first."""
    at, here = group.index, own
    for step in range(group.count):
        coming = None
        if step < group.count - 1:
            before = (at - 1) % group.count
            coming = yield RingShift((here,), 1, (_with_rows(own, lengths[before]),))
        use(at, here)
        if coming is not None:
            (here,), at = (yield coming), before


def _homeward(group: KernelGroup, lengths: Sequence[int], term: Callable[[int], Tensor]) -> Steps:
    """The sum of all members' terms for one's own rows: it sets out from the next member, and each
    makes its own term while it comes."""
    index, count = group.index, group.count
    total = term((index - 1) % count if count > 1 else index)
    for step in range(1, count):
        after = (index - 1 - step) % count
        shape = list(total.shape)
        shape[ROWS] = lengths[after]
        coming = yield RingShift((total,), 1, (shape,))
        own = term(after)
        (total,) = yield coming
        total += own
    return total


def _with_rows(x: Tensor, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[ROWS] = rows
    return shape


def _into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """The product, where it belongs."""
    if out.is_contiguous() and out.numel():
        torch.mm(x.flatten(0, -2), weight, out=out.view(-1, out.shape[-1]))
    else:
        out.copy_(x @ weight)


def _add_product(total: Tensor, slope: Tensor, x: Tensor, is_first: bool) -> None:
    """One's own rows come first, and overwrite what was in the memory."""
    beta = 0 if is_first else 1
    total.addmm_(slope.flatten(0, -2).t(), x.flatten(0, -2).conj(), beta=beta)


def _gathered_traffic(
    count: int, inputs: Sequence[float], outputs: Sequence[float], needs: Sequence[bool]
) -> CommVolume:
    rows, weight = inputs
    once, rings = (("shift", rows),) * (count - 1), sum(needs)
    # Forward, and for the weight, each piece is of another member's rows. Sums of gradients of rows
    # come home: a term is made, and added.
    of_rows = ExtraPiece(weight + 2 * rows, 2 * rows)
    of_weight = ExtraPiece(rows + weight, weight)
    further = ExtraPiece(weight + rows), _of_both(needs, of_rows, of_weight)
    return CommVolume(once, once * rings, (count - 1, rings * (count - 1)), further)


def _scattered_traffic(
    count: int, inputs: Sequence[float], outputs: Sequence[float], needs: Sequence[bool]
) -> CommVolume:
    (_, weight), (rows,) = inputs, outputs
    once = (("shift", rows),) * (count - 1)
    of_rows, of_weight = ExtraPiece(rows + weight), ExtraPiece(rows + weight, weight)
    further = ExtraPiece(weight + 2 * rows, 2 * rows), _of_both(needs, of_rows, of_weight)
    return CommVolume(once, once, (count - 1, sum(needs) * (count - 1)), further)


def _of_both(needs: Sequence[bool], *parts: ExtraPiece) -> ExtraPiece:
    """Of the gradients that are asked for."""
    asked = [part for part, is_asked in zip(parts, needs) if is_asked]
    return ExtraPiece(sum(one.read for one in asked), sum(one.written for one in asked))


GATHERED = JointKernel(gathered_product, gathered_product_backward, _gathered_traffic, True)
SCATTERED = JointKernel(scattered_product, scattered_product_backward, _scattered_traffic, True)
