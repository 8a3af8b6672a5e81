"""Shared containers: one list, dict or cache that stands in the arguments of a call several times.

A program takes what stands in containers, not these themselves. Where forward changes one of them,
it would change the other, too, which a program does not see.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.object_contents import PLAIN
from autopar.errors import InvalidInput

_UNCHANGING = (*PLAIN, Tensor, tuple, complex, bytes, frozenset)


def require_separate(args: tuple[Any, ...], kwargs: Any) -> None:
    """Refuse a container that is given twice, to a forward that changes containers."""
    seen = dict[int, Any]()
    twice = list[Any]()

    def note(value: Any) -> bool:
        if not isinstance(value, _UNCHANGING):
            if id(value) in seen:
                twice.append(value)
            seen[id(value)] = value
        return False

    for value in (*args, *kwargs.values()):
        pytree.tree_leaves(value, is_leaf=note)
    if twice:
        raise InvalidInput(
            "each container that forward changes is given once",
            got=f"one {type(twice[0]).__name__} in two places of the arguments",
            remedy="hand over a copy as one of them, or change forward to take it once",
        )
