"""Laws of Python numbers in the arguments, which change from call to call, for both backends."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import autopar as ap
from tests.dynamic import counted
from tests.outputs import gradients


class Scaled(nn.Module):
    """Does with two numbers what its kind says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: float = 1.0, rounds: int = 0) -> Tensor:
        y = self.up(x)
        if self.kind == "computed":
            y = y * weight + (1 - weight / 3) * y - rounds
        if self.kind == "in place":
            y *= weight
            y = y / (rounds + 1)
        if self.kind == "of one element":
            y = y.sum() * weight * rounds
        if self.kind == "its type":
            y = y * weight if isinstance(weight, float) and not isinstance(rounds, float) else y
        if self.kind == "branch":
            y = y * (weight if weight > 0.5 else 2 * weight)
        if self.kind == "shape":
            y = y[:, : 1 + rounds % 3] * weight
        if self.kind == "exponent":
            y = y * math.exp(weight)
        if self.kind == "its digits":
            y = y * len(f"{weight!r}")
        if self.kind == "truth":
            y = y * (weight > 0.5)
        return y.square().mean()


class OfClass(Scaled):
    """Asks for the class of a number in a way that cannot be answered by another."""

    def forward(self, x: Tensor, weight: float = 1.0, rounds: int = 0) -> Tensor:
        return (self.up(x) * weight * (2 if type(weight) is float else 3)).square().mean()


CALLS = ((0.3, 1), (0.4, 2), (0.45, 3), (0.9, 4), (0.2, 5), (0.35, 7), (1.7, 8), (0.0, 0))
# How many programs each kind needs for these calls.
PROGRAMS = {
    "computed": 2,
    "in place": 2,
    "of one element": 2,
    "its type": 2,
    "branch": 3,
    "shape": 4,
    "exponent": len(CALLS),
    "its class": len(CALLS),
    "its digits": len(CALLS),
    "truth": 3,
}


def takes_numbers(kind: str, **options: Any) -> None:
    """Losses and gradients are those of the model, to the last bit on one rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make = OfClass if kind == "its class" else Scaled
        model, x = make(kind), torch.randn(8, 4)
    (weight, rounds), *_ = CALLS
    module = ap.parallelize(
        copy.deepcopy(model), (x,), {"weight": weight, "rounds": rounds}, **options
    )
    exact = {"rtol": 0.0, "atol": 0.0} if options["mesh"].size == 1 else {}
    for weight, rounds in CALLS:
        for each in (model, module):
            each.zero_grad()
        loss = model(x, weight=weight, rounds=rounds)
        loss.backward()
        step = module.step(x, rounds=rounds, weight=weight)
        torch.testing.assert_close(step, loss.detach(), **exact)
        torch.testing.assert_close(module.full_grads(), gradients(model), **exact)
    assert len(module.programs) == PROGRAMS[kind], (kind, str(module.programs))
    with counted() as count:
        for weight, rounds in CALLS:
            module.step(x, weight=weight, rounds=rounds)
    assert count == {"searches": 0, "captures": 0}
