"""Fake: a copy of a model without its memory, so that capture never touches the user's model.

Every parameter and buffer of the copy is a fake tensor. Meta tensors become fake tensors of the
device on which the rest lives (the CPU when all are meta): a model too large for this machine
captures like any other.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Seen in torch 2.13: there is no public way to create fake tensors or to suspend a mode.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from autopar._torch import keeps_statistics
from autopar.capture.graph_builder import fake_like
from autopar.capture.object_contents import LEAVES, PLAIN, attributes_of, is_a, values_in
from autopar.capture.plain_tensors import require_plain, require_plain_attributes
from autopar.errors import InvalidInput, said
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

# What copy.deepcopy takes as it is.
_NOT_COPIED = (*LEAVES, FunctionType, BuiltinFunctionType, ModuleType, type, weakref.ref)


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
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        require_plain_attributes(path, module)
    for name, tensor in _tensors(model):
        _check(name, tensor)
        if id(tensor) in memo:
            continue
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = _parameter(_fake(mode, tensor.detach(), device), tensor)
        elif name in buffers or has_no_data(tensor):
            memo[id(tensor)] = _fake(mode, tensor.detach(), device)
        else:
            memo[id(tensor)] = tensor.detach()  # a plain attribute: a constant, kept by value
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InvalidInput(
            "capture works on a copy of the model, made by copy.deepcopy",
            got=f"{type(model).__name__}, which fails with {said(error)}",
            remedy="keep locks, handles and generators out of the module, or define __deepcopy__",
        ) from error


def own_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with its values; what it keeps of a run before, by value as well."""
    return copy.deepcopy(
        model, {id(t): t.detach().clone() for _, t in _tensors(model) if not t.is_leaf}
    )


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

    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in _tensors(model)}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and not keeps_statistics(module):
                made = _as(mode, parameter, precision.compute)
                memo[id(parameter)] = _parameter(made, parameter)
    leaves = [cast(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
    return copy.deepcopy(model, memo), leaves


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


def by_every_name(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers by each of their names, in the order of an export."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that stand in plain attributes of modules, however deep."""
    yield from by_every_name(model)
    modules = dict(model.named_modules())
    seen = {id(module) for module in modules.values()}
    held = [
        (f"{prefix}.{name}", value)
        for prefix, module in modules.items()
        for name, value in attributes_of(module).items()
    ]
    for name, value in held:  # which grows meanwhile
        if is_a(value, Tensor):
            yield name, value
        elif id(value) not in seen and type(value) not in PLAIN and not is_a(value, *_NOT_COPIED):
            seen.add(id(value))
            held += [(name, inner) for inner in values_in(value)]


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
