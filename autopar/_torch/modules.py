"""Private facts of modules: their hooks, normalisation statistics and names in state dicts."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY as COMPOSABLE_REGISTRY
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["COMPOSABLE_REGISTRY"]  # imported here for others

MODULE_CALL = "_call_impl"  # the method of a module that runs its forward, and hooks around that


def backward_hooks(module: nn.Module) -> list[Callable]:
    """Return the hooks of a module that run in backward."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def global_backward_hooks() -> list[Callable]:
    """Return the hooks that run in backward of every module."""
    hooks = (_modules._global_backward_pre_hooks, _modules._global_backward_hooks)
    return [hook for registered in hooks for hook in registered.values()]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that run around its forward or backward."""
    around = module._forward_pre_hooks or module._forward_hooks
    return bool(around or module._backward_pre_hooks or module._backward_hooks)


def has_code_around_forward(module: nn.Module) -> bool:
    """Return whether calling a module runs a user's code besides its forward."""
    registered = _modules._global_forward_pre_hooks or _modules._global_forward_hooks
    return type(module).__call__ is not nn.Module.__call__ or bool(registered) or has_hooks(module)


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module normalises by statistics that it keeps from call to call."""
    return isinstance(module, _NormBase) and module.track_running_stats


def has_state_hooks(module: nn.Module) -> bool:
    """Return whether a module changes what `state_dict` gives; autopar's own hooks do not."""
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("autopar.") for hook in hooks)


def has_load_hooks(module: nn.Module) -> bool:
    """Return whether hooks other than torch's own run around a module's `load_state_dict`."""
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    hooks = (*before.values(), *after.values())
    return any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)


def state_names(model: nn.Module) -> list[str]:
    """Return the names that `state_dict` has where no hook changes it."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]


def is_collecting_wrappers() -> bool:
    """Return whether the caller's caller is torch's walk over the wrappers in a tree of modules.

    That walk, which state dicts make, asks each module for attributes and is one function.
    """
    asking = sys._getframe(3)
    is_named_so = asking.f_code.co_name == "_get_fsdp_states_with_modules"
    return is_named_so and asking.f_globals["__name__"] == "torch.distributed.fsdp._traversal_utils"
