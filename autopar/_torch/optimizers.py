"""Private facts of torch's optimizers and gradient scalers: what stands around their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer


def step_without_hooks(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the function `step` of a class of optimizers, without hooks and profiler ranges.

    The first optimizer of a class puts them around its step (seen in torch 2.11 to 2.13).
    """
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def check_gradient_scalers(check: Callable[[Optimizer], None]) -> None:
    """Call `check` with an optimizer before a `GradScaler` looks at its gradients.

    Both `unscale_` and `step` do so by one private method (seen in torch 2.11 to 2.13).
    """
    kind: Any = GradScaler
    unscale = kind._unscale_grads_

    @wraps(unscale)
    def checked(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        check(optimizer)
        return unscale(scaler, optimizer, *args, **kwargs)

    kind._unscale_grads_ = checked
