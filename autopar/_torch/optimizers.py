"""Private facts of torch's optimizers: the hooks around their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def step_without_hooks(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the function `step` of a class of optimizers, without hooks and profiler ranges.

    The first optimizer of a class puts them around its step (seen in torch 2.11 to 2.13).
    """
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
