"""Refuse double backward: gradients computed by hand have no gradients, which users are told.

A backward written by hand is no part of the graph. Autograd would take its results for constants,
and silently give a second gradient of zero, or too small a one:

    ends = gradient_ends(x, w)                in forward, of what is read
    forbid_double_grad(gradients, ends, ...)  in backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InvalidInput

GradientEnds = tuple[
    Tensor, ...
]  # in a tuple it is no argument of a function that would take a gradient


def gradient_ends(*tensors: Tensor | None) -> GradientEnds:
    """Return a tuple of one empty tensor that depends on all learning `tensors`, or ()."""
    learns = [x for x in tensors if x is not None and x.requires_grad]
    return (_GradientEnds.apply(*learns),) if learns and torch.is_grad_enabled() else ()


def forbid_double_grad(
    found: Sequence[Tensor | None],
    ends: GradientEnds,
    came: Sequence[Tensor],
    name: str,
    remedy: str,
) -> Sequence[Tensor | None]:
    """Return gradients that `name` computed by hand from `came`; differentiating them raises."""
    depends = [x for x in (*ends, *came) if x.requires_grad]
    if not (torch.is_grad_enabled() and depends):
        return found
    return _ForbidDoubleBackward.apply((name, remedy), len(depends), *depends, *found)


class _GradientEnds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("nothing is computed with it")


class _ForbidDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, told: tuple[str, str], count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.told = told
        return tuple(None if x is None else x.view_as(x) for x in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, remedy = ctx.told
        raise InvalidInput(
            "what is differentiated by hand has a gradient, and that has none",
            got=f"a gradient of a gradient of {name}",
            remedy=remedy,
        )
