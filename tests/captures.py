"""Captures that are shared: a model is captured once, however often it is planned and attached.

    with shared_captures():
        plan = ap.plan(case.model, case.args)
        module = ap.parallelize(case.model, case.args, plan=plan)    # does not capture again

What differs in modes, inputs, or the tensors of the tree is captured anew. What a model's code does
may not change meanwhile: that another program is refused is for
`tests/runtime/test_same_program.py` to say, with no captures shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.precision import Precision

USERS = "autopar.planning", "autopar.plan.plan"


@contextmanager
def shared_captures() -> Iterator[None]:
    """Within, what plans and what attaches plans finds captures that were made before."""
    made: dict[Any, tuple[nn.Module, Captured]] = {}

    def once(
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        precision: Precision | None = None,
    ) -> Captured:
        if not isinstance(model, nn.Module):
            return capture(model, args, kwargs, precision)
        key = id(model), _state(model), _call(args, dict(kwargs or {})), precision
        if key not in made:
            made[key] = model, capture(model, args, kwargs, precision)  # the model keeps its id
        return made[key][1]

    users = [patch.object(import_module(name), "capture", once) for name in USERS]
    for user in users:
        user.start()
    try:
        yield
    finally:
        for user in users:
            user.stop()


def _state(model: nn.Module) -> Any:
    modules = [(name, id(one), one.training) for name, one in model.named_modules()]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return tuple(modules), tuple((name, id(one), _kind(one)) for name, one in tensors)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(
        _kind(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
