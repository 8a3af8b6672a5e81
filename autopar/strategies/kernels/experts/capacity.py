"""Capacity: an expert takes a limited number of the tokens that choose it.

Each sequence of tokens counts by itself. All first choices come before all second ones, and among
them earlier tokens before later ones. Tokens [t k] without a batch dim are one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_capacity(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Return for each choice, [... tokens k], whether its expert takes it."""
    return WITHIN_CAPACITY(chosen, experts, capacity)


def _run(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    waiting = chosen.flatten(0, -3).mT.flatten(1) if chosen.ndim > 2 else chosen.mT.reshape(1, -1)
    sequences = torch.arange(len(waiting), device=chosen.device)
    rows = (waiting + experts * sequences.unsqueeze(1)).flatten()  # the experts of each sequence
    order = rows.argsort(stable=True)
    sizes = torch.bincount(rows, minlength=experts * len(waiting))
    starts = sizes.cumsum(0) - sizes
    numbers = torch.arange(len(rows), device=chosen.device)
    places = torch.empty_like(rows)
    places[order] = numbers - starts[rows[order]]
    *leading, tokens, choices = chosen.shape
    return (places < capacity).view(*leading, choices, tokens).mT.contiguous()


def _fake(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    return torch.empty_like(chosen, dtype=torch.bool, memory_format=torch.contiguous_format)


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("within_capacity(Tensor chosen, int experts, int capacity) -> Tensor")
_library.impl("within_capacity", _run, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::within_capacity", _fake, lib=_library)
WITHIN_CAPACITY = torch.ops.autopar.within_capacity.default
