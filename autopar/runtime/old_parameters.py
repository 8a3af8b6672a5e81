"""Old parameters: those of models that were parallelized, which an optimizer may still hold.

    optimizer = AdamW(model.parameters())      # before parallelize(): trains nothing
    pm = ap.parallelize(model, inputs)
    pm.step(x); optimizer.step()               # refused

A model may go on to be trained plainly: then its parameters have gradients, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.errors import InvalidInput

_old: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def note_old_parameters(model: nn.Module) -> None:
    """A model was parallelized: its own parameters do not learn by that."""
    _watch_optimizers()
    for parameter in model.parameters():
        _old[id(parameter)] = parameter


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: tuple, kwargs: Mapping[str, Any]) -> None:
    if not _has_closure(args, kwargs):
        _refuse_old(optimizer)


def _after(optimizer: Optimizer, args: tuple, kwargs: Mapping[str, Any]) -> None:
    if _has_closure(args, kwargs):  # which makes the gradients
        _refuse_old(optimizer)


def _has_closure(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return len(args) > 1 or kwargs.get("closure") is not None


def _refuse_old(optimizer: Optimizer) -> None:
    """Refuse one that has nothing but old parameters, without gradients. Of one that learns, the
    first parameter with a gradient ends this."""
    found = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or _old.get(id(parameter)) is not parameter:
                return
            found = True
    if found:
        raise InvalidInput(
            "an optimizer of a parallel module is made of the module's own parameters",
            got=f"a step of {type(optimizer).__name__}, whose parameters are those of a model that "
            "was parallelized since: none has a gradient",
            remedy=f"{type(optimizer).__name__}(pm.parameters(), ...) after "
            "pm = ap.parallelize(model, ...)",
        )
