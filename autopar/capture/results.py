"""Results: one result of an operator that gives several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def pick(operator: Callable[..., Any], index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`operator(*args, **kwargs)[index]`: a node of a captured graph has one tensor."""
    return operator(*args, **kwargs)[index]
