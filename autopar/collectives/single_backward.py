"""Once: gradients that have none themselves, which is said to who asks for them.

A backward by hand is no part of a graph. What it gives would be taken for constants, and a gradient
of it for nothing, or for less than it is:

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
    """Nothing, that depends on all of these that take a gradient."""
    learns = [x for x in tensors if x is not None and x.requires_grad]
    return (_GradientEnds.apply(*learns),) if learns and torch.is_grad_enabled() else ()


def forbid_double_grad(
    found: Sequence[Tensor | None],
    ends: GradientEnds,
    came: Sequence[Tensor],
    name: str,
    remedy: str,
) -> Sequence[Tensor | None]:
    """Gradients that `name` found by hand, of what came; where they are recorded, a gradient of
    theirs is refused."""
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
