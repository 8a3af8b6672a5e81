"""Refuse the optimizers of torch that do not work on the parameters of a parallel module.

On processes parameters are DTensors, and a rank of a pipeline has those of its stages. Optimizers
that go element by element, or by parameter, do the same there as on one device.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adafactor, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InvalidInput

# Parallel modules on processes, and whether other ranks have other parameters.
_registered: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def register_module(module: nn.Module, *, has_stages: bool) -> None:
    """Remember a parallel module on processes, and whether other ranks have other parameters."""
    _watch_optimizers()
    _registered[module] = has_stages


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would fail in the middle, or differ between ranks."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_fused_sgd = isinstance(optimizer, SGD) and is_fused
    if not (is_fused_sgd or isinstance(optimizer, LBFGS | Adafactor | Rprop)):
        return
    of_stages = {
        id(p): stages for module, stages in _registered.items() for p in module.parameters()
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtensors = [p for p in parameters if id(p) in of_stages and isinstance(p, DTensor)]
    kind, pieces = type(optimizer).__name__, 'states="whole" with mode="data", or another optimizer'
    is_cut = any(not placed.is_replicate() for p in dtensors for placed in p.placements)
    if isinstance(optimizer, LBFGS) and any(of_stages[id(p)] for p in dtensors):
        got, remedy = "parameters of some stages of a pipeline", "pipeline=None, or " + pieces
    elif isinstance(optimizer, LBFGS | Adafactor) and is_cut:
        got, remedy = "parameters that are kept in pieces", pieces
    elif isinstance(optimizer, Rprop) and dtensors:
        got, remedy = "DTensors", "another optimizer"
    elif is_fused_sgd and dtensors:
        kind, got, remedy = f"{kind}(fused=True)", "DTensors", "foreach=True instead of fused=True"
    else:
        return
    raise InvalidInput(
        "an optimizer does on processes what it does on one device",
        got=f"a step of torch's {kind}, which does not for {got}",
        remedy=remedy,
    )
