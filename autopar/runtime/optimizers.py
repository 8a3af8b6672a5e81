"""Optimizers of torch that do not work on the parameters of a parallel module, refused up front.

On processes parameters are DTensors, and on a rank of a pipeline they are those of its stages.
Optimizers that go element by element, or by parameter, do there what they do on one device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adafactor, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InvalidInput

_own: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
_of_stages: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def note_parameters(parameters: Iterable[Tensor], has_stages: bool) -> None:
    """Of a parallel module on processes; `has_stages`: other ranks have others."""
    _watch_optimizers()
    for parameter in parameters:
        _own[id(parameter)] = parameter
        if has_stages:
            _of_stages[id(parameter)] = parameter


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would break off in the middle, or be another on each rank."""
    if not isinstance(optimizer, LBFGS | SGD | Adafactor | Rprop):
        return
    own = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _own.get(id(parameter)) is parameter and isinstance(parameter, DTensor)
    ]
    kind, pieces = type(optimizer).__name__, 'states="whole" with mode="data", or another optimizer'
    is_cut = any(not placed.is_replicate() for _, one in own for placed in one.placements)
    if isinstance(optimizer, LBFGS) and any(id(parameter) in _of_stages for _, parameter in own):
        got, remedy = "parameters of some stages of a pipeline", "pipeline=None, or " + pieces
    elif isinstance(optimizer, LBFGS | Adafactor) and is_cut:
        got, remedy = "parameters that are kept in pieces", pieces
    elif isinstance(optimizer, Rprop) and own:
        got, remedy = "DTensors", "another optimizer"
    elif isinstance(optimizer, SGD) and any(group.get("fused") for group, _ in own):
        kind, got, remedy = f"{kind}(fused=True)", "DTensors", "foreach=True instead of fused=True"
    else:
        return
    raise InvalidInput(
        "an optimizer does on processes what it does on one device",
        got=f"a step of torch's {kind}, which does not for {got}",
        remedy=remedy,
    )
