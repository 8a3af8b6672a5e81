"""Functions with a backward of their own, which export would drop.

Export records what the forward of a `torch.autograd.Function` does, operator by operator, and
nothing of its backward: a gradient would be that of those operators, another one or none at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.utils import _pytree as pytree

from autopar.capture.hooks import replaced
from autopar.errors import InvalidInput
from autopar.lines import caller

_INNER = ("torch.", "autopar.")  # these stand behind operators that the graph keeps

# Known to have the backward that their operators have, and so captured as those.
_SAME = ("transformers.models.bloom.modeling_bloom.GeLUFunction",)


@contextmanager
def own_backwards_refused() -> Iterator[None]:
    """Refuse every autograd.Function that a gradient would flow through."""
    before = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        is_inner = cls.__module__.startswith(_INNER)
        is_same = f"{cls.__module__}.{cls.__qualname__}" in _SAME
        leaves = pytree.tree_leaves((args, kwargs))
        learns = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        if learns and torch.is_grad_enabled() and not (is_inner or is_same):
            raise _refused(cls)
        return before.__get__(None, cls)(*args, **kwargs)

    with replaced(Function, "apply", classmethod(apply)):
        yield


def _refused(cls: type[Function]) -> InvalidInput:
    return InvalidInput(
        "gradients are those of the operators of forward; one written by hand belongs to an "
        "operator",
        got=f"{cls.__name__}, a torch.autograd.Function, on values that take a gradient",
        remedy="make it an operator by torch.library.custom_op and register_autograd, with a rule "
        "by register_rule(); or write its gradient with tensors, as y + (value - y).detach()",
        source=caller(),
    )
