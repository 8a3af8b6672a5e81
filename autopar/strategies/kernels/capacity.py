"""Capacity: which choices an expert takes that takes no more than so many.

All first choices come before all second ones, and among them earlier tokens before later ones, in
the order of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_capacity(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Of each choice, [... k], whether its expert takes it."""
    return WITHIN_CAPACITY(chosen, experts, capacity)


def _run(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    waiting = chosen.reshape(-1, chosen.shape[-1]).t().reshape(-1)
    order = waiting.argsort(stable=True)
    sizes = torch.bincount(waiting, minlength=experts)
    starts = sizes.cumsum(0) - sizes
    numbers = torch.arange(len(waiting), device=chosen.device)
    places = torch.empty_like(waiting)
    places[order] = numbers - starts[waiting[order]]
    is_taken = places < capacity
    return is_taken.view(chosen.shape[-1], -1).t().reshape(chosen.shape)


def _fake(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    return torch.empty_like(chosen, dtype=torch.bool, memory_format=torch.contiguous_format)


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("within_capacity(Tensor chosen, int experts, int capacity) -> Tensor")
_library.impl("within_capacity", _run, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::within_capacity", _fake, lib=_library)
WITHIN_CAPACITY = torch.ops.autopar.within_capacity.default
