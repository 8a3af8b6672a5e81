"""Rounding: how far the numbers of a coarse dtype can move each result of a training.

The captured program is trained again, with every coarse value and its gradient moved by one to two
units in the last place, up or down. A result that does not move is exact, and is compared as
strictly as if the program had no coarse numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.fake import own_copy
from autopar.verification.references import (
    CapturedModule,
    RunInputs,
    TrainingResult,
    compare_training,
    train_module,
)
from autopar.verification.tolerance import ResultKey, Tolerances, eps_of, to_double_precision

TRIALS = 4  # by chance, one may leave a number nearly where it was


def measure_tolerances(
    captured: Captured, inputs: RunInputs, exact: TrainingResult, rate: float
) -> Tolerances:
    """Return the tolerance of each result; `exact` is the unperturbed training."""
    widest = Tolerances.at_most(captured, inputs.dtype)
    if widest.are_one:
        return widest
    every = replace(widest, strict=widest.coarse)
    moved: dict[ResultKey, float] = {}
    for seed in range(TRIALS):
        copy = own_copy(inputs.model)
        program = CapturedModule(copy, captured)
        program.change = _Perturbation(captured, widest.eps, seed)
        perturbed, _ = train_module(program, copy, inputs.call, len(exact.losses), rate)
        for row in compare_training(perturbed, exact, every):
            place = row.kind, row.name
            moved[place] = max(moved.get(place, 0.0), row.error)
    return replace(widest, moved=_at_least_one_unit(moved, exact, widest.eps))


def _at_least_one_unit(
    moved: Mapping[ResultKey, float], exact: TrainingResult, eps: float
) -> dict[ResultKey, float]:
    """Raise the movement of each coarse result to one unit: it is itself rounded."""
    units = {
        (kind, name): eps_of(value.dtype)
        for kind, values in exact.results.items()
        for name, value in values.items()
        if eps_of(value.dtype) > eps
    }
    return {place: max(value, units.get(place, 0.0)) for place, value in moved.items()}


class _Perturbation:
    """A function that moves each coarse value as it is made."""

    def __init__(self, captured: Captured, eps: float, seed: int) -> None:
        self.kept = captured.parameters.keys() | captured.buffers.keys()
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def __call__(self, node: fx.Node, value: Any) -> Any:
        if node.op != "call_function" and node.name not in self.kept:
            return value  # an input or a constant is what it is
        return pytree.tree_map_only(Tensor, self._moved, value)

    def _moved(self, value: Tensor) -> Tensor:
        return (
            _PerturbFunction.apply(value, self.generator)
            if eps_of(value.dtype) > self.eps
            else value
        )


class _PerturbFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _perturb(value, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _perturb(gradient, ctx.generator), None


def _perturb(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return elements moved by one to two units in the last place, within the dtype."""
    draws = 2 * torch.rand(value.shape, generator=generator) - 1
    units = (draws + draws.sign()).to(value.device)
    fine = to_double_precision(value)
    moved = fine * (1 + eps_of(value.dtype) * units)
    fits = moved.to(value.dtype).to(fine.dtype).isfinite()
    return moved.where(fits, fine).to(value.dtype)
