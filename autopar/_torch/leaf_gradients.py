"""Private hooks and reference counts by which leaves get their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from autopar._torch.autograd import is_batched
from autopar._torch.tensors import plain_attributes

_BEFORE, _AFTER = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def gradient_hooks(tensor: Tensor) -> list[Callable]:
    """Return a user's hooks that run when a leaf gets its gradient."""
    hooks = (*(_BEFORE(tensor) or {}).values(), *(_AFTER(tensor) or {}).values())
    return [hook for hook in hooks if hook is not unshared_gradient]


def has_gradient_hooks(tensors: Collection[Tensor]) -> bool:
    """Return whether a user has hooks on the gradient of any leaf, in 0.3 µs for each leaf."""
    with plain_attributes():
        registered = filter(None, chain(map(_BEFORE, tensors), map(_AFTER, tensors)))
        return any(hook is not unshared_gradient for hooks in registered for hook in hooks.values())


def keep_gradients_unshared(leaves: Iterable[Tensor]) -> None:
    """Register a hook on leaves that learn, by which their gradients share no memory."""
    for leaf in leaves:
        if leaf.requires_grad and unshared_gradient not in (_BEFORE(leaf) or {}).values():
            leaf.register_hook(unshared_gradient)


def unshared_gradient(gradient: Tensor) -> Tensor | None:
    """Return a copy of a gradient that shares memory with anything else; None if it shares none.

    torch lets a leaf keep the tensor that backward made, and later adds to it in place, if nobody
    else holds that tensor. Others may hold its memory: in `stack([a, b]).sum(0)` both leaves get
    views of the same elements.
    """
    is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
    if torch.is_grad_enabled() or not is_plain or is_batched(gradient):
        return None  # torch copies it, or nobody adds to it in place
    storage, base = gradient.untyped_storage(), gradient._base
    # The memory is held by `storage`, by the gradient, and by what this is a view of: that by
    # the gradient and by `base`.
    holders = torch._C._storage_Use_Count(storage._cdata) - (base is not None)
    is_shared = holders > 2 or (base is not None and base._use_count() > 2)  # type: ignore[attr-defined]
    return gradient.clone() if is_shared or storage.nbytes() > gradient.nbytes else None
