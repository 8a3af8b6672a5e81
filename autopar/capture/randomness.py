"""Randomness: which calls of a graph draw random numbers."""

from __future__ import annotations

import torch
from torch import fx

from autopar.strategies import Call


def may_be_random(node: fx.Node) -> bool:
    """Whether two equal calls may give different values."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers: not with a probability of 0, nor out of training."""
    if not may_be_random(node):
        return False
    call = Call(node)
    is_off = any(call.get(name) is False for name in ("train", "training"))
    return not is_off and all(call.get(name) != 0 for name in ("p", "dropout", "dropout_p"))
