"""Products in steps around an axis; each step multiplies while the next message travels.

`gathered_product` is the linear operator whose rows are cut, as its weight's are, and whose output
is cut by the weight's: instead of an all-gather before it, pieces arrive one by one.
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
    """Return the rows of all members times this member's columns."""
    lengths = group.input(0).lengths
    out = input.new_empty(*input.shape[:ROWS], sum(lengths), weight.shape[0])
    rows = out.split(lengths, ROWS)
    yield from _pass_rows(
        group, lengths, input, lambda at, x: _write_product(rows[at], x, weight.t())
    )
    return (out,), (input, weight), None


def gathered_product_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: None, grad: Tensor
) -> Steps:
    """Return the gradients: rows pass once more for the weight, sums of theirs come home."""
    input, weight = saved
    lengths = group.input(0).lengths
    rows, of_weight = grad.split(lengths, ROWS), torch.empty_like(weight)

    def add(at: int, x: Tensor) -> None:
        _add_product(of_weight, rows[at], x, is_first=at == group.index)

    of_input = None
    if group.needs[1]:
        yield from _pass_rows(group, lengths, input, add)
    if group.needs[0]:
        of_input = yield from _sum_of_terms(group, lengths, lambda at: rows[at] @ weight.conj())
    return of_input, of_weight if group.needs[1] else None


def scattered_product(
    group: KernelGroup, input: Tensor, weight: Tensor, bias: None = None
) -> Steps:
    """Return this member's rows of the sum of all members' products."""
    lengths = group.output().lengths
    rows = input.split(lengths, ROWS)
    out = yield from _sum_of_terms(group, lengths, lambda at: rows[at] @ weight.t())
    return (out,), (input, weight), None


def scattered_product_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: None, grad: Tensor
) -> Steps:
    """Return the gradients: those of all rows pass by."""
    input, weight = saved
    lengths = group.output().lengths
    rows, of_weight = input.split(lengths, ROWS), torch.empty_like(weight)
    of_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    parts = of_input.split(lengths, ROWS)

    def add(at: int, g: Tensor) -> None:
        if group.needs[0]:
            _write_product(parts[at], g, weight.conj())
        if group.needs[1]:
            _add_product(of_weight, g, rows[at], is_first=at == group.index)

    yield from _pass_rows(group, lengths, grad.contiguous(), add)
    return of_input if group.needs[0] else None, of_weight if group.needs[1] else None


def _pass_rows(
    group: KernelGroup, lengths: Sequence[int], local: Tensor, use: Callable[[int, Tensor], None]
) -> Steps:
    """Pass the rows of each member, beginning with the local ones, to `use` with its index."""
    at, rows = group.index, local
    for step in range(group.count):
        coming = None
        if step < group.count - 1:
            before = (at - 1) % group.count
            coming = yield RingShift((rows,), 1, (_with_rows(local, lengths[before]),))
        use(at, rows)
        if coming is not None:
            (rows,), at = (yield coming), before


def _sum_of_terms(
    group: KernelGroup, lengths: Sequence[int], term: Callable[[int], Tensor]
) -> Steps:
    """Return the sum of all members' terms for this member's rows.

    It sets out from the next member, and each computes its own term while the sum travels.
    """
    index, count = group.index, group.count
    total = term((index - 1) % count if count > 1 else index)
    for step in range(1, count):
        after = (index - 1 - step) % count
        shape = list(total.shape)
        shape[ROWS] = lengths[after]
        coming = yield RingShift((total,), 1, (shape,))
        local = term(after)
        (total,) = yield coming
        total += local
    return total


def _with_rows(x: Tensor, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[ROWS] = rows
    return shape


def _write_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write the product of x and the weight to `out`."""
    if out.is_contiguous() and out.numel():
        torch.mm(x.flatten(0, -2), weight, out=out.view(-1, out.shape[-1]))
    else:
        out.copy_(x @ weight)


def _add_product(total: Tensor, slope: Tensor, x: Tensor, *, is_first: bool) -> None:
    """Add the gradient of a weight by some rows; the first rows overwrite new memory."""
    beta = 0 if is_first else 1
    total.addmm_(slope.flatten(0, -2).t(), x.flatten(0, -2).conj(), beta=beta)


def _gathered_traffic(
    count: int, inputs: Sequence[float], outputs: Sequence[float], needs: Sequence[bool]
) -> CommVolume:
    rows, weight = inputs
    once, rings = (("shift", rows),) * (count - 1), sum(needs)
    # In forward, and for the weight, each piece has another member's rows. Sums of gradients of
    # rows come home: a term is computed, and added.
    of_rows = ExtraPiece(weight + 2 * rows, 2 * rows)
    of_weight = ExtraPiece(rows + weight, weight)
    further = ExtraPiece(weight + rows), _needed_pieces(needs, of_rows, of_weight)
    return CommVolume(once, once * rings, (count - 1, rings * (count - 1)), further)


def _scattered_traffic(
    count: int, inputs: Sequence[float], outputs: Sequence[float], needs: Sequence[bool]
) -> CommVolume:
    (_, weight), (rows,) = inputs, outputs
    once = (("shift", rows),) * (count - 1)
    of_rows, of_weight = ExtraPiece(rows + weight), ExtraPiece(rows + weight, weight)
    further = ExtraPiece(weight + 2 * rows, 2 * rows), _needed_pieces(needs, of_rows, of_weight)
    return CommVolume(once, once, (count - 1, sum(needs) * (count - 1)), further)


def _needed_pieces(needs: Sequence[bool], *parts: ExtraPiece) -> ExtraPiece:
    """Return the sum of the parts whose gradients are needed."""
    needed = [part for part, is_needed in zip(parts, needs) if is_needed]
    return ExtraPiece(sum(p.read for p in needed), sum(p.written for p in needed))


GATHERED = JointKernel(gathered_product, gathered_product_backward, _gathered_traffic, True)
SCATTERED = JointKernel(scattered_product, scattered_product_backward, _scattered_traffic, True)
