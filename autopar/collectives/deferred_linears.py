"""Linears whose input gradient is reduced while the gradients of their weights are computed.

The backward of a movement in front of linears is a reduction that their weights do not wait for. In
one function with them it starts as soon as the gradient of their input is complete:

    y, z = linears(x, identity, ("tp",), w, b, v, None)     y = linear(x, w, b); z = linear(x, v)

Results, and the tensors saved for backward, are those of the movement and the linears by
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar._torch.communication import process_group, wait_for
from autopar.collectives.eager_movements import identity_then_sum_in_place
from autopar.collectives.torch_operators import EAGER, start_reduce_scatter

_ops = torch.ops.autopar
Finish = Callable[[], Tensor]


def linears(x: Tensor, movement: Any, arguments: tuple, *parameters: Tensor | None) -> Any:
    """Apply a linear for each weight and bias to `movement(x, *arguments)`; a single one returns no
    tuple.

    Their gradients have no gradients themselves.
    """
    learns = [value is not None and value.requires_grad for value in parameters[::2]]
    is_watched = x.requires_grad and any(learns) and torch.is_grad_enabled()
    if is_watched and x.is_floating_point():
        results = _Linears.apply(x, movement, arguments, *parameters)
    else:
        move = identity_then_sum_in_place if movement is _ops.identity.default else EAGER[movement]
        results = _forward(move(x, *arguments), parameters)
    return results if len(results) > 1 else results[0]


def _forward(x: Tensor, parameters: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(parameters[::2], parameters[1::2]))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, movement: Any, arguments: tuple, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        moved = x if movement is _ops.identity.default else EAGER[movement](x, *arguments)
        ctx.save_for_backward(moved, *parameters[::2])
        ctx.start, ctx.arguments = STARTS[movement], arguments
        ctx.set_materialize_grads(False)
        return _forward(moved, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        moved, *weights = ctx.saved_tensors
        rows = [None if gradient is None else _rows(gradient) for gradient in gradients]
        total: Tensor | None = None
        for row, weight in zip(rows, weights):
            if row is not None:
                total = row @ weight if total is None else total.addmm_(row, weight)
        assert total is not None
        finish = ctx.start(total.view(moved.shape), *ctx.arguments)
        columns = _rows(moved)
        weight_gradients: list[Tensor | None] = []
        for row, (weight, bias) in zip(rows, _pairs(ctx.needs_input_grad[3:])):
            weight_gradients += [
                row.t() @ columns if weight and row is not None else None,
                row.sum(0) if bias and row is not None else None,
            ]
        return finish(), None, None, *weight_gradients


def _rows(value: Tensor) -> Tensor:
    """Return the value as a matrix, also where it has no elements."""
    return value.reshape(value.shape[:-1].numel(), value.shape[-1])


def _pairs(values: Sequence[bool]) -> list[tuple[bool, bool]]:
    return list(zip(values[::2], values[1::2]))


# How the backward of each movement is started, of a gradient that nobody else reads.


def _start_sum(gradient: Tensor, group: str, pending: bool = True) -> Finish:
    work = dist.all_reduce(gradient, group=process_group(group), async_op=True)

    def finish() -> Tensor:
        wait_for(work)
        return gradient

    return finish


def _start_scatter(
    gradient: Tensor, dim: int, size: int, group: str, parts: int, index: int, pending: bool
) -> Finish:
    return start_reduce_scatter(gradient, dim, group, parts, index)


# By movement; an all-reduce or an all-gather only where the gradient comes as a partial sum.
STARTS: dict[Any, Callable[..., Finish]] = {
    _ops.identity.default: _start_sum,
    _ops.all_reduce.default: _start_sum,
    _ops.all_gather.default: _start_scatter,
}
