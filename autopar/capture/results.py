"""Results: one result of an operator that gives several, and its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.strategies import Call, Rule, register_rule
from autopar.strategies.rule import Saved
from autopar.strategies.shapes import names, same_dims

aten = torch.ops.aten
# Values and their places along one dim.
_ALONG = (
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.cummax.default,
    aten.cummin.default,
)


def pick(operator: Callable[..., Any], index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`operator(*args, **kwargs)[index]`: a node of a captured graph has one tensor."""
    return operator(*args, **kwargs)[index]


def _along(call: Call) -> Rule | None:
    """The dim that an operator runs along stays whole."""
    operator = call["operator"]
    if operator not in _ALONG:
        return None
    place = [argument.name for argument in operator._schema.arguments].index("dim")
    dim = call.get("dim", call.get(f"args{place}", -1))
    dims = tuple(names(len(call.shape)))
    saved = Saved(extra=(dims,) if call["index"] == 0 else ())  # the places
    return same_dims(call, [call.dim(dim)], passes=(), saved=saved)


register_rule(pick, _along)
