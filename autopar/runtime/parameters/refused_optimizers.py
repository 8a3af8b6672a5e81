"""Refuse the optimizers and norms of torch that are wrong for parameters of a parallel module.

On processes parameters are DTensors, and a rank of a pipeline has those of its stages. Optimizers
that go element by element, or by parameter, do the same there as on one device. A total norm does
not: each rank would clip by the norm of its stages.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adafactor, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar._torch.optimizers import check_gradient_scalers
from autopar._torch.total_norms import check_total_norms
from autopar.errors import InvalidInput
from autopar.runtime.optimizers.local_optimizer import LocalOptimizer

# Parallel modules on processes, and whether other ranks have other parameters.
_registered: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def register_module(module: nn.Module, *, has_stages: bool) -> None:
    """Remember a parallel module on processes, and whether other ranks have other parameters."""
    _watch_optimizers()
    if has_stages:
        _watch_stages()
    _registered[module] = has_stages


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_step)


@cache
def _watch_stages() -> None:
    check_total_norms(_refuse_norm)
    check_gradient_scalers(_refuse_scaler)


def _refuse_norm(tensors: list[Tensor]) -> None:
    """Refuse the norm of gradients, or parameters, that are those of some stages alone."""
    passed = {id(tensor) for tensor in tensors}
    for module in [module for module, has_stages in _registered.items() if has_stages]:
        if any(id(p) in passed or id(p.grad) in passed for p in module.parameters()):
            raise InvalidInput(
                "a total norm is that of the whole model, the same on every rank",
                got="tensors of a pipeline's module, of which a rank has those of its stages",
                remedy="module.clip_grad_norm_(max_norm) of the parallel module; it returns the "
                "norm before clipping, and with max_norm=float('inf') it only computes it",
            )


def _refuse_scaler(optimizer: Optimizer) -> None:
    """Refuse to look for overflows in the gradients of some stages alone."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in [module for module, has_stages in _registered.items() if has_stages]:
        if not parameters.isdisjoint(map(id, module.parameters())):
            raise InvalidInput(
                "a step is skipped on all ranks, or on none",
                got="a GradScaler for a pipeline's module, of which a rank has the gradients of "
                "its stages",
                remedy='ap.Precision(loss_scale="dynamic"), which scales the loss of step()',
            )


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would fail in the middle, or differ between ranks."""
    if isinstance(optimizer, LocalOptimizer):
        return
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
    local = f"ap.optimizer({kind}, pm, ...), which updates local tensors"
    is_cut = any(not placed.is_replicate() for p in dtensors for placed in p.placements)
    if isinstance(optimizer, LBFGS) and any(of_stages[id(p)] for p in dtensors):
        got, remedy = "parameters of some stages of a pipeline", "pipeline=None, or " + pieces
    elif isinstance(optimizer, LBFGS | Adafactor) and is_cut:
        got = "parameters that are kept in pieces"
        remedy = pieces if isinstance(optimizer, LBFGS) else local
    elif isinstance(optimizer, Rprop) and dtensors:
        got, remedy = "DTensors", local
    elif is_fused_sgd and dtensors:
        kind, got, remedy = f"{kind}(fused=True)", "DTensors", local
    else:
        return
    raise InvalidInput(
        "an optimizer does on processes what it does on one device",
        got=f"a step of torch's {kind}, which does not for {got}",
        remedy=remedy,
    )
