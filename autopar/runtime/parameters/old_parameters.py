"""Refuse optimizers of the parameters that a model had before it was parallelized.

    optimizer = AdamW(model.parameters())      # before parallelize(): trains nothing
    pm = ap.parallelize(model, inputs)
    pm.step(x); optimizer.step()               # refused

The model keeps its old values. After its parallel module has learned, one warning says so when the
model is called or its state is taken. A model that goes on to be trained by itself has gradients or
other values, and gives no warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from autopar.errors import InvalidInput
from autopar.text.source_lines import frames_to_caller

_old_parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
_Parameters = WeakValueDictionary[int, Tensor]  # by number, which another may get after this one
_parallelized: WeakKeyDictionary[nn.Module, tuple[int, _Parameters]] = WeakKeyDictionary()
_untrained: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()  # and its model
_checked_groups: WeakKeyDictionary[Optimizer, int] = (
    WeakKeyDictionary()
)  # and the number of its groups


def note_old_parameters(model: nn.Module, module: nn.Module) -> None:
    """Remember the parameters of a model that was parallelized to `module`."""
    _watch_optimizers()
    named = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    for count, others in _parallelized.values():
        shared = [name for key, (name, value) in named.items() if others.get(key) is value]
        _warn_of_shared(shared, len(named), count)
    parameters = {key: parameter for key, (_, parameter) in named.items()}
    _parallelized[module] = len(parameters), WeakValueDictionary(parameters)
    _untrained[module] = ref(model)
    _old_parameters.update(parameters)


def parallel_modules() -> list[nn.Module]:
    """Return the living parallel modules, the latest first."""
    return [*_parallelized][::-1]


def _warn_of_shared(shared: list[str], count: int, others: int) -> None:
    """Warn of parameters that two models share, if each has others: they are shared no more."""
    if 0 < len(shared) < min(count, others):
        warnings.warn(
            f"{min(shared)}{f' and {len(shared) - 1} more' if len(shared) > 1 else ''} of this "
            "model is another's too, which was parallelized before: each parallel module has its "
            "own copy, until it is put in place, as in b.layer.weight = a.layer.weight",
            stacklevel=frames_to_caller(),
        )


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple, kwargs: Mapping[str, Any]) -> None:
    if not _has_closure(args, kwargs):
        _refuse_old_parameters(optimizer)


def _after_step(optimizer: Optimizer, args: tuple, kwargs: Mapping[str, Any]) -> None:
    if _has_closure(args, kwargs):  # which makes the gradients
        _refuse_old_parameters(optimizer)
    count = len(optimizer.param_groups)
    if not _untrained or _checked_groups.get(optimizer) == count:
        return
    _checked_groups[optimizer] = count
    learned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module, model in [*_untrained.items()]:
        if not learned.isdisjoint(map(id, module.parameters())):
            del _untrained[module]
            if (plain := model()) is not None:
                _OldModel(plain)


class _OldModel:
    """A model with other values than its parallel module, of which one warning tells.

    It is given when the model, or a child as behind a loss, is called or gives its state."""

    def __init__(self, model: nn.Module) -> None:
        self._is_silent, self._model, self._versions = False, ref(model), _sum_versions(model)
        # Pickles and copies get these functions instead, which need no autopar.
        before_forward = _OldModelHook(self, (dict.get, {}))
        before_state = _OldModelHook(self, (slice,))
        self._handles = list[RemovableHandle]()
        for module in (model, *model.children()):
            self._handles.append(module.register_forward_pre_hook(before_forward))
            module.register_state_dict_pre_hook(before_state)

    def warn(self, module: nn.Module) -> None:
        model = self._model()
        if self._is_silent or model is None or torch.compiler.is_compiling():
            return
        self._is_silent = True
        for handle in self._handles:
            handle.remove()
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        if not has_gradients and self._versions == _sum_versions(model):
            warnings.warn(
                f"this {type(module).__name__} has the values from before parallelize(): what its "
                "parallel module has learned since is in that alone. Call the parallel module, or "
                "model.load_state_dict(pm.full_state_dict()) first",
                stacklevel=frames_to_caller(),
            )


@dataclass(frozen=True)
class _OldModelHook:
    """A hook of a model, which copies of the model do not have."""

    model: _OldModel
    of_copies: tuple[Any, ...]  # a function of Python, and arguments

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self.model.warn(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, self.of_copies


def _sum_versions(model: nn.Module) -> int:
    return sum(p._version for p in model.parameters() if not p.is_inference())


def _has_closure(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return len(args) > 1 or kwargs.get("closure") is not None


def _refuse_old_parameters(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has nothing but old parameters without gradients."""
    is_old = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or _old_parameters.get(id(parameter)) is not parameter:
                return  # of one that learns, the first parameter with a gradient ends this
            is_old = True
    if is_old:
        raise InvalidInput(
            "an optimizer of a parallel module is made of the module's own parameters",
            got=f"a step of {type(optimizer).__name__}, whose parameters are those of a model that "
            "was parallelized since: none has a gradient",
            remedy=f"{type(optimizer).__name__}(pm.parameters(), ...) after "
            "pm = ap.parallelize(model, ...)",
        )
