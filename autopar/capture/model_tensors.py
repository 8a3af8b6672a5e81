"""The tensors of a model: those that are registered, and those that stand in plain attributes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from autopar.capture.object_contents import LEAVES, PLAIN, attributes_of, is_a, values_in

# What copy.deepcopy takes as it is.
_NOT_COPIED = (*LEAVES, FunctionType, BuiltinFunctionType, ModuleType, type, weakref.ref)


def by_every_name(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by each of their names, in the order of an export."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and tensors in plain attributes of modules, however deep."""
    yield from by_every_name(model)
    yield from ((name, value) for name, value in values_of(model) if is_a(value, Tensor))


def values_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what stands in plain attributes of modules, however deep."""
    modules = dict(model.named_modules())
    seen = {id(module) for module in modules.values()}
    held = [
        (f"{prefix}.{name}".lstrip("."), value)
        for prefix, module in modules.items()
        for name, value in attributes_of(module).items()
    ]
    for name, value in held:  # which grows meanwhile
        if is_a(value, Tensor):
            yield name, value
        elif id(value) not in seen and type(value) not in PLAIN and not is_a(value, *_NOT_COPIED):
            seen.add(id(value))
            yield name, value
            held += [(name, inner) for inner in values_in(value)]
