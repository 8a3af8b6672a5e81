"""Fake: a copy of a model without its memory, so that capture never touches the user's model.

Every parameter and buffer of the copy is a fake tensor. Meta tensors become fake tensors of the
device on which the rest lives (the CPU when all are meta): a model too large for this machine
captures like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

# Seen in torch 2.13: there is no public way to create fake tensors or to suspend a mode.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from autopar._torch.modules import has_running_statistics
from autopar.capture.graph_builder import fake_like
from autopar.capture.model_tensors import by_every_name, tensors_of, values_of
from autopar.capture.object_contents import is_a
from autopar.capture.parameter_aliases import aliases_of, lead
from autopar.capture.plain_tensors import require_plain, require_plain_attributes
from autopar.capture.refused import require_no_script
from autopar.errors import InvalidInput, error_text
from autopar.precision import Precision

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "computing",
    "fake_inputs",
    "fake_model",
    "home",
    "masters",
    "outside_fake_mode",
]


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Suspend a fake mode that the caller may have entered."""
    return unset_fake_temporarily()


def new_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def home(model: nn.Module, leaves: Iterable[Any]) -> torch.device:
    """Where the model lives: the first device that is not meta, else the CPU."""
    for value in (*leaves, *model.parameters(), *model.buffers()):
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            return value.device
    return torch.device("cpu")


def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of `model`, structure and attributes, on fake parameters and buffers."""
    memo: dict[int, Any] = {}
    registered = {id(tensor): tensor for _, tensor in by_every_name(model)}
    aliases = aliases_of(model)
    for path, module in model.named_modules():
        require_no_script(path, module)
        require_plain_attributes(path, module)
    for name, tensor in tensors_of(model):
        _check(name, tensor)
        if id(tensor) in memo:
            continue
        if id(tensor) in registered:
            fake = _fake(mode, tensor.detach(), device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = _parameter(fake, tensor) if is_parameter else fake
        elif tensor.requires_grad or aliases.is_view(tensor):
            memo[id(tensor)] = tensor  # forward reads what is registered in its place, or fails
        elif has_no_data(tensor):
            memo[id(tensor)] = _fake(mode, tensor.detach(), device)
        else:
            memo[id(tensor)] = tensor.detach()  # a plain attribute: a constant, kept by value
    try:
        return _copied(model, memo)
    except Exception as error:
        raise InvalidInput(
            "capture works on a copy of the model, made by copy.deepcopy",
            got=f"{type(model).__name__}, which fails with {error_text(error)}",
            remedy="keep locks, handles and generators out of the module, or define __deepcopy__",
        ) from error


def own_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with its values; what it keeps of a run before, by value as well."""
    aliases, memo = aliases_of(model), dict[int, Any]()
    for _, tensor in tensors_of(model):
        if aliases.is_view(tensor):
            memo[id(tensor)] = tensor
        elif not tensor.is_leaf:
            memo[id(tensor)] = tensor.detach().clone()
    return _copied(model, memo)


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model. Modules that pickle themselves otherwise than by what stands
    in them, as those of Keras, which are built anew with other variables, are copied like others.
    """
    copies: list[tuple[nn.Module, nn.Module]] = []
    held = (value for _, value in values_of(model) if is_a(value, nn.Module))
    for module in (*model.modules(), *held):
        kind = type(module)
        if kind.__reduce__ is not object.__reduce__ and not hasattr(kind, "__deepcopy__"):
            memo[id(module)] = new = object.__new__(kind)
            copies.append((module, new))
    for module, new in copies:
        vars(new).update(copy.deepcopy(vars(module), memo))
    copied = copy.deepcopy(model, memo)
    lead(copied, model, memo)
    return copied


def fake_inputs(leaves: Iterable[Any], mode: FakeTensorMode, device: torch.device) -> list[Any]:
    """The flat arguments, tensors as fakes."""
    result = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # A tensor given twice becomes two fakes: the program must tell its inputs apart.
            leaf = _fake(mode, leaf.detach(), device).requires_grad_(leaf.requires_grad)
        result.append(leaf)
    return result


def computing(
    model: nn.Module, inputs: list[Any], mode: FakeTensorMode, precision: Precision
) -> tuple[nn.Module, list[Any]]:
    """A copy of a fake `model`, and its inputs, in the dtype that a program computes in.

    Batch norm keeps its parameters: its statistics are no place for few digits.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return _as(mode, tensor, precision.compute) if tensor.is_floating_point() else tensor

    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in tensors_of(model)}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and not has_running_statistics(module):
                made = _as(mode, parameter, precision.compute)
                memo[id(parameter)] = _parameter(made, parameter)
    leaves = [cast(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
    return _copied(model, memo), leaves


def masters(
    model: nn.Module, mode: FakeTensorMode, precision: Precision | None
) -> dict[str, torch.Tensor]:
    """The parameters of a fake model, by name, in the dtypes in which they are kept."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    if precision is None:
        return named
    for name, value in named.items():
        if (kept := precision.master_of(value.dtype)) != value.dtype:
            named[name] = _parameter(_as(mode, value, kept), value)
    return named


def _as(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_contiguous():
        return fake_like(mode, tensor, dtype=dtype)
    with mode:
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def _parameter(fake: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A fake that nobody else has, as a parameter, which a constructor would make a view of."""
    fake.requires_grad_(like.requires_grad)
    fake._is_param = True
    return fake


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    place = device if tensor.device.type == "meta" else tensor.device
    return fake_like(mode, tensor, place)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one in shape only."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def _check(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise InvalidInput(
            "the shape of every parameter is known before capture",
            got=f"{name}, which belongs to a lazy module",
            remedy="run the model once on example inputs",
        )
    require_plain(name, tensor)
