"""Gather the tensors of a parallel module to those of the model, on all ranks together.

pm.full_state_dict()              on all ranks
pm.save_pretrained(folder)        the model's method: rank 0 writes, and all wait for it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import Tensor

from autopar.runtime.module.call_agreement import rank_of, run_on_all_ranks
from autopar.runtime.parameters.placing import is_sharded


def gather_state(module: Any, held: Mapping[str, Tensor], call: str) -> dict[str, Tensor]:
    """Return by name the full tensors of which ranks hold pieces in `held`.

    Ranks that make another call than `call` are refused together with this one."""
    if module.program.stages or any(map(is_sharded, held.values())):
        run_on_all_ranks(module.backend, lambda: None, call)
    with module.backend.guard():
        tensors = module.backend.collect(held)
    return {name: tensors[name] for name in module._names if name in tensors}


def save_with_full_state(module: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `save` of the model's class with the model's state dict, on rank 0.

    If the caller passes a state dict, call `save` with it on every rank."""
    arguments = signature(save).bind_partial(module, *args, **kwargs).arguments | kwargs
    if arguments.get("state_dict") is not None:
        return save(module, *args, **kwargs)
    state, tied = module.full_state_dict(), module.program.captured.tied
    state = {name: state[tied.get(name, name)] for name in state}

    def write() -> Any:
        if rank_of(module.backend) != 0:
            return None
        vars(module)["state_dict"] = lambda *_, **__: dict(state)
        try:
            return save(module, *args, **kwargs)
        finally:
            del vars(module)["state_dict"]

    return run_on_all_ranks(module.backend, write, "save_pretrained()")
