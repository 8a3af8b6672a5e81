"""Captures that are shared: a model is captured once, however often it is planned and attached.

    with shared_captures():
        plan = ap.plan(case.model, case.args)
        module = ap.parallelize(case.model, case.args, plan=plan)    # does not capture again

What differs in modes, inputs, or the tensors of the tree is captured anew. What a model's code does
may not change meanwhile: that another program is refused is for
`tests/runtime/test_same_program.py` to say, with no captures shared. So are captures of calls that
a module makes another program for. Models that were made in one way are captured once, too:

    alike(model, "net")
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.capture.again import _shape, captured_again
from autopar.capture.autocasts import active
from autopar.capture.captured import Captured
from autopar.precision import Precision
from autopar.runtime.module import call_capture

USERS = "autopar.planning", "autopar.plans.plan"
Model = TypeVar("Model", bound=nn.Module)
_made = WeakKeyDictionary[nn.Module, Any]()


def alike(model: Model, made: Any) -> Model:
    """The model; all that are alike but for the values of their tensors are `made` the same."""
    _made[model] = made
    return model


@contextmanager
def shared_captures() -> Iterator[None]:
    """Within, what plans and what attaches plans finds captures that were made before."""
    made: dict[Any, tuple[Any, Captured]] = {}

    def once(
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        precision: Precision | None = None,
    ) -> Captured:
        if not isinstance(model, nn.Module):
            return capture(model, args, kwargs, precision)
        key = _state(model), _call(args, dict(kwargs or {})), precision, active()
        if key not in made:
            made[key] = model, capture(model, args, kwargs, precision)  # the model keeps its id
        return made[key][1]

    def again(
        first: Captured,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        training: Mapping[str, bool],
        **others: Collection[Any],
    ) -> Captured:
        how = tuple(sorted(training.items())), *((k, *sorted(v)) for k, v in others.items())
        key = id(first), _call(*pytree.tree_map_only(Tensor, _shape, (args, dict(kwargs)))), how
        if key not in made:
            made[key] = first, captured_again(first, args, kwargs, training, **others)
        return made[key][1]

    users = [patch.object(import_module(name), "capture", once) for name in USERS]
    users.append(patch.object(call_capture, "captured_again", again))
    for user in users:
        user.start()
    try:
        yield
    finally:
        for user in users:
            user.stop()


def _state(model: nn.Module) -> Any:
    modules = [*model.named_modules(remove_duplicate=False)]
    tensors = [*model.named_parameters(remove_duplicate=False)]
    tensors += model.named_buffers(remove_duplicate=False)
    names: dict[int, Any] = {}  # of the modules and tensors of one that is like others
    if model in _made:
        for name, one in (*modules, *tensors):
            names.setdefault(id(one), (_made[model], name))
    kinds = [(name, one.training) for name, one in modules]
    kinds += [(name, _kind(one)) for name, one in tensors]
    return *kinds, *(names.get(id(one), id(one)) for _, one in (*modules, *tensors))


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(
        _kind(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
