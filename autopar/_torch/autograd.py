"""Private facts of autograd: the backward pass that runs, hooks on saved tensors, functorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _outer_hooks
from torch._functorch import eager_transforms as function_transforms
from torch._functorch.predispatch import _vmap_decrement_nesting as mapping_ends
from torch._functorch.predispatch import _vmap_increment_nesting as mapping_begins
from torch.autograd import Variable, forward_ad, profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.autograd.graph import get_gradient_edge

__all__ = ["function_transforms", "mapping_begins", "mapping_ends"]  # imported here for others

Pack = Callable[[Tensor], Any]


def saved_tensor_hooks() -> tuple[Pack, Callable[[Any], Tensor]]:
    """Return the innermost hooks that pack and unpack tensors saved for backward."""
    return _outer_hooks(False) or (lambda tensor: tensor, lambda packed: packed)


def unchanged_for_autograd(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which changes of tensors in place do not count for autograd.

    Their values are put back before backward reads them. Seen in torch 2.11 to 2.13."""
    return preserve_versions(tuple(tensors))


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is under way has ended."""
    Variable._execution_engine.queue_callback(callback)


def backward_pass_number() -> int:
    """Return the number of the backward pass that this is called in; -1 outside of one."""
    return torch._C._current_graph_task_id()


def will_receive_gradient(leaf: Tensor) -> bool:
    """Return whether the backward pass that is under way gives a leaf its gradient."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch's answer where autograd.grad() is asked for this leaf
        return True


def is_transformed() -> bool:
    """Return whether functorch or forward differentiation is active, which wrap tensors."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(gradient: Tensor) -> bool:
    """Return whether a gradient is several at once, as `is_grads_batched` makes it."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def is_profiling() -> bool:
    """Return whether a profiler of torch listens."""
    return profiler._is_profiler_enabled
