"""Loss scale: the factor of a loss that keeps small gradients from underflow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InvalidInput
from autopar.runtime.module.gradient_accumulation import is_partial
from autopar.text.source_lines import shorten

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale doubles


@dataclass
class LossScale:
    """Doubles after many good steps, halves when a gradient overflows. The same on every rank."""

    value: float = INITIAL_SCALE
    good: int = 0  # steps since it changed
    skipped: int = 0  # steps that gave no gradients

    def update(self, *, is_good: bool) -> None:
        """Adjust the scale after a step; `is_good`: all gradients of all ranks are finite."""
        self.good = self.good + 1 if is_good else 0
        self.skipped += not is_good
        if not is_good:
            self.value /= 2
        elif self.good == GROWTH_INTERVAL:
            self.value, self.good = self.value * 2, 0


def require_scale(scale: object, dtype: torch.dtype) -> float:
    """Return the factor of the gradients from a caller's `scale=`, 1.0 for None; or refuse it.

    `dtype` is that of the loss, in which the first gradient is computed.
    """
    if scale is None:
        return 1.0
    most = torch.finfo(dtype).max
    number: Any = scale if isinstance(scale, Real) and not isinstance(scale, bool) else None
    if number is None or not -most <= number <= most:
        is_long = isinstance(number, int) and number.bit_length() > 1024
        raise InvalidInput(
            "a step multiplies its gradients by a finite number, which the dtype of the loss has",
            got=f"scale={'of many digits' if is_long else shorten(repr(scale))}, of type "
            f"{type(scale).__name__}, and a loss in {dtype}",
            remedy="scale=1 / n in each of n steps that make one update",
        )
    return float(number)


def set_gradients_aside(tensors: Iterable[Tensor]) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Take the gradients of parameters away, except partial sums, and return both."""
    parameters = (parameter for parameter in tensors if isinstance(parameter, nn.Parameter))
    gradients = [
        (parameter, parameter.grad) for parameter in parameters if not is_partial(parameter.grad)
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    return gradients


@torch.no_grad()
def restore_gradients(
    before: Iterable[tuple[nn.Parameter, Tensor | None]], scale: float, *, is_good: bool
) -> None:
    """Scale new gradients down and add them to those from before; drop them unless `is_good`."""
    for parameter, earlier in before:
        gradient, parameter.grad = parameter.grad, earlier
        if gradient is None or not is_good:
            continue
        if scale != 1:
            gradient.div_(scale)
        parameter.grad = gradient if earlier is None else earlier.add_(gradient)
