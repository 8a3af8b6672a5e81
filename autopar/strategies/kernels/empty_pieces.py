"""Empty pieces: a rank without elements adds nothing, whatever the operator.

An empty piece of a dim that the output has makes the output empty; one of a dim that is summed
makes it a sum of nothing. So it is zeros of the local shape, and so are the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def zero_result(shape: list[int], dtype: torch.dtype, *inputs: Tensor, learns: bool) -> Tensor:
    """Return zeros that autograd leads to all inputs, if the operator `learns`."""
    if not learns:
        return inputs[0].new_zeros(shape, dtype=dtype)
    return _Zeros.apply(shape, dtype, *inputs)


def zero_results(
    shapes: list[list[int]], dtypes: list[torch.dtype], *inputs: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    """Return `zero_result` for each result of an operator that has several."""
    return tuple(zero_result(s, d, *inputs, learns=learns) for s, d in zip(shapes, dtypes))


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: list[int], dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        # The gradients are like the inputs, which themselves may go.
        ctx.forms = [(t.shape, t.dtype, t.device) for t in inputs]
        return inputs[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if needs else None
            for (shape, dtype, device), needs in zip(ctx.forms, ctx.needs_input_grad[2:])
        )
        return None, None, *zeros
