"""Small programs that do odd things with numbers; each call is compared with the plain model."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests.outputs import gradients

WIDTH = 4
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
FLOATS = (0.5, 0.25, 0.75, 2.0, 0.0, -0.0, math.nan, math.inf, 1e300, 3, 1, True, 1.0)
WHOLES = (1, 2, 3, 1000, 3_000_000, 2**31, 2**32, 2**40, 2**53, 2**53 + 1, 2**61, -5, 0)


class Numbered(nn.Module):
    """Computes what its kind says, of a matrix and a number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, w: Any) -> Tensor:
        return KINDS[self.kind](self.up(x), w).square().mean()


def _times(y: Tensor, w: Any) -> Tensor:
    return y * w


def _sign_of_zero(y: Tensor, w: Any) -> Tensor:
    return y * math.copysign(1.0, w)


def _over(y: Tensor, w: Any) -> Tensor:
    return y / (1 / w)


def _over_tensor(y: Tensor, w: Any) -> Tensor:
    return w / (y + 3) + (w - y) / (w + 1)


def _caught(y: Tensor, w: Any) -> Tensor:
    try:
        return y * (1 / w)
    except ZeroDivisionError:
        return y * 5.0


def _caught_remainder(y: Tensor, w: Any) -> Tensor:
    try:
        return y * (7 % w)
    except ZeroDivisionError:
        return y * 5.0


def _square(y: Tensor, w: Any) -> Tensor:
    return y * ((w * w + 1) / (w * w + 3))


def _cube(y: Tensor, w: Any) -> Tensor:
    return y * (w * w * w / 1e20)


def _branch_of_square(y: Tensor, w: Any) -> Tensor:
    return y * (2 if w * w > 10**18 else 1)


def _large_sum(y: Tensor, w: Any) -> Tensor:
    return y * ((w + w + w - 1) / (2 + w * w))


def _negated(y: Tensor, w: Any) -> Tensor:
    return y * -w + -(w * 3)


def _in_place(y: Tensor, w: Any) -> Tensor:
    w *= 2
    w += 1
    y = y * 1.0
    y *= w
    y /= 3
    return y


def _of_class(y: Tensor, w: Any) -> Tensor:
    return y * (2 if isinstance(w, bool) else 3 if isinstance(w, int) else 4)


def _as_key(y: Tensor, w: Any) -> Tensor:
    return y * {0.5: 2, 1: 3, 0: 4}.get(w, 5)


def _compared(y: Tensor, w: Any) -> Tensor:
    return y * (1 if w == w and not math.isinf(w) else 0.5)


def _minimum(y: Tensor, w: Any) -> Tensor:
    return y * min(w, 1.2) + max(0, w)


def _power(y: Tensor, w: Any) -> Tensor:
    return y * 2.0 ** min(w, 9)


def _bits(y: Tensor, w: Any) -> Tensor:
    return y * (int(w) & 3)


def _text(y: Tensor, w: Any) -> Tensor:
    return y * len(str(w))


def _indexed(y: Tensor, w: Any) -> Tensor:
    return y * len(range(w)[:3])


KINDS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    name.removeprefix("_").replace("_", " "): function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and name.islower()
}


def computes_with_every_number(kind: str, numbers: Sequence[Any], **options: Any) -> None:
    """Losses and gradients are those of the model to the last bit; where it raises, a step does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Numbered(kind).double()
    x = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).view(8, WIDTH)
    module = ap.parallelize(copy.deepcopy(model), (x, numbers[0]), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many programs
        for number in numbers:
            for each in (model, module):
                each.zero_grad()
            try:
                loss = model(x, number)
            except (ArithmeticError, RuntimeError, TypeError, ValueError):
                with pytest.raises((ap.AutoparError, RuntimeError)):
                    module.step(x, number)
                continue
            loss.backward()
            torch.testing.assert_close(module.step(x, number), loss.detach(), **EXACT)
            torch.testing.assert_close(module.full_grads(), gradients(model), **EXACT)
