"""Whole: the tensors of a parallel module as those of the model, for all ranks together.

pm.full_state_dict()              on all ranks
pm.save_pretrained(folder)        the model's own: rank 0 writes, and all wait for it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import Tensor

from autopar.runtime.module.call_agreement import rank_of, run_on_all_ranks
from autopar.runtime.parameters.placing import is_sharded


def gather_state(module: Any, held: Mapping[str, Tensor], call: str) -> dict[str, Tensor]:
    """Whole tensors from those that ranks hold, by name; ranks that make another `call` are told
    of this one."""
    if module.program.stages or any(map(is_sharded, held.values())):
        run_on_all_ranks(module.backend, lambda: None, call)
    with module.backend.guard():
        found = module.backend.collect(held)
    return {name: found[name] for name in module._names if name in found}


def save_with_full_state(module: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `save` of the model's class does, with the state dict of the model. Given one by the
    caller it does what it does, on this rank alone."""
    given = signature(save).bind_partial(module, *args, **kwargs).arguments | kwargs
    if given.get("state_dict") is not None:
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
