"""A linear recurrence, as state-space models have: in one operator, not in a loop over time.

>>> x, decay = torch.ones(1, 4), torch.tensor(0.5)
>>> linear_scan(decay, x, dim=1)
tensor([[1.0000, 1.5000, 1.7500, 1.8750]])
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import InvalidInput
from autopar.strategies.kernels import recurrences


def linear_scan(a: Tensor, b: Tensor, start: Tensor | None = None, *, dim: int) -> Tensor:
    """Return all h[t] = a[t] * h[t - 1] + b[t] along a dim.

    Args:
        a: The decays. They and `b` are broadcast to each other.
        b: The inputs.
        start: The state h[-1], which is broadcast to a state. None: zero.
        dim: The dim of time.
    """
    shape = torch.broadcast_shapes(a.shape, b.shape)
    if not -len(shape) <= dim < len(shape):
        raise InvalidInput(
            "a recurrence runs along a dim of what it reads",
            got=f"dim={dim} of {[*shape]}",
            remedy="dim=1, where time is the second dim",
        )
    dtype = torch.promote_types(a.dtype, b.dtype)
    if start is not None:
        dtype = torch.promote_types(dtype, start.dtype)
        dim %= len(shape)
        state = (*shape[:dim], *shape[dim + 1 :])
        if len(start.shape) > len(state) or torch.broadcast_shapes(start.shape, state) != state:
            raise InvalidInput(
                "the start of a recurrence is one state",
                got=f"a start of {[*start.shape]} for states of {[*state]}",
                remedy="a start without the dim that the recurrence runs along",
            )
        start = start.to(dtype).expand(state)
    a, b = (x.to(dtype).expand(shape) for x in (a, b))
    return recurrences.linear_scan(a, b, start, dim)
