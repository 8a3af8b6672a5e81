"""Randomness: which calls of a graph draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def may_be_random(node: fx.Node) -> bool:
    """Whether two equal calls may give different values."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers: not with a probability of 0, nor out of training."""
    if not may_be_random(node):
        return False
    operator: Any = node.target
    names = [declared.name for declared in operator._schema.arguments]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    is_off = any(given.get(name) is False for name in ("train", "training"))
    return not is_off and all(given.get(name) != 0 for name in ("p", "dropout", "dropout_p"))
