"""LossScale: how far a loss is scaled up so that small gradients do not vanish."""

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
GROWTH_INTERVAL = 2000  # steps without an overflow after which more is tried


@dataclass
class LossScale:
    """Doubles after many good steps, halves when a gradient overflows. The same on every rank."""

    value: float = INITIAL_SCALE
    good: int = 0  # steps since it changed
    skipped: int = 0  # steps that gave no gradients

    def update(self, is_good: bool) -> None:
        """A step is over; whether all its gradients are numbers, on all ranks."""
        self.good = self.good + 1 if is_good else 0
        self.skipped += not is_good
        if not is_good:
            self.value /= 2
        elif self.good == GROWTH_INTERVAL:
            self.value, self.good = self.value * 2, 0


def require_scale(scale: object, dtype: torch.dtype) -> float:
    """What gradients are multiplied by, as a caller gives it, if at all; or refuse that. `dtype`:
    of the loss, from which the first gradient is made."""
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


def take_gradients(kept: Iterable[Tensor]) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Those that are parameters, with the gradients that they had; now they have none, but for
    those that are still to be summed (no_sync.py)."""
    parameters = (one for one in kept if isinstance(one, nn.Parameter))
    found = [(one, one.grad) for one in parameters if not is_partial(one.grad)]
    for parameter, _ in found:
        parameter.grad = None
    return found


@torch.no_grad()
def restore_gradients(
    before: Iterable[tuple[nn.Parameter, Tensor | None]], scale: float, is_good: bool
) -> None:
    """Scale gradients down and add them to those from before, or drop them."""
    for parameter, earlier in before:
        made, parameter.grad = parameter.grad, earlier
        if made is None or not is_good:
            continue
        if scale != 1:
            made.div_(scale)
        parameter.grad = made if earlier is None else earlier.add_(made)
