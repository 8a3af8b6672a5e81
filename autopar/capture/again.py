"""Again: a model that was captured once is captured for another call.

    captured_again(captured, args, kwargs, {"": False, "drop": False}, learning=())

It is the copy of the model without memory that the first capture has left: what its forward has
read of the model then, it reads again. In other modes, with inputs of other shapes, or with more
parameters that learn it may give another program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.autocasts import switched
from autopar.capture.captured import Captured
from autopar.capture.export import capture
from autopar.capture.policies import keep_answers_like

THIS = "the inputs of this call"


def captured_again(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: Mapping[str, bool],
    learning: Collection[str] = (),
    frozen: Collection[str] = (),
    numbers: Collection[int] = (),
) -> Captured:
    """Return the program of another call, with these modules in training mode, or not.

    `learning`: the parameters that learn beside those that did; `frozen`: those that did, and do
    not now. `numbers`: the flat arguments that are numbers and inputs. No random numbers are drawn.
    """
    example = captured.example
    modules = dict(example.model.named_modules(remove_duplicate=False))
    parameters = dict(example.model.named_parameters())
    modes, learned = example.modes, {n: p.requires_grad for n, p in parameters.items()}
    values = pytree.tree_leaves((args, dict(kwargs)))
    args, kwargs = pytree.tree_map_only(Tensor, _shape, (args, dict(kwargs)))
    try:
        for path, is_training in training.items():
            modules[path].training = is_training
        for name in learning:
            parameters[name].requires_grad_(True)
        for name in frozen:
            parameters[name].requires_grad_(False)
        with switched(example.autocasts), torch.random.fork_rng(devices=[]):
            precision = example.precision
            other = capture(example.model, args, kwargs, precision, THIS, values, numbers)
            return keep_answers_like(other, captured)
    finally:
        for path, was_training in modes.items():
            modules[path].training = was_training
        for name, was_learning in learned.items():
            parameters[name].requires_grad_(was_learning)


def _shape(given: Tensor) -> Tensor:
    """The same without memory: it is then where the model is."""
    with torch.inference_mode(False), torch.no_grad():
        shape = given.shape, given.stride()
        made = torch.empty_strided(*shape, dtype=given.dtype, device="meta")
    return made.requires_grad_(given.requires_grad)
