"""Private facts of operators: the arguments that they write, their fastest call, their kernels."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

# `below_autograd` is what a kernel for autograd calls the kernel below it by.
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _len_torch_dispatch_stack as active_modes  # such as tracing, fake tensors
from torch.cpu import _is_amx_tile_supported as multiplies_tiles  # of half precision

__all__ = ["active_modes", "below_autograd", "multiplies_tiles"]  # imported here for others


def written_arguments(operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that an operator changes in place."""
    declared = operator._schema.arguments
    values = {a.name: value for a, value in zip(declared, args)} | dict(kwargs)
    is_written = {a.name for a in declared if a.alias_info is not None and a.alias_info.is_write}
    return [value for name, value in values.items() if name in is_written]


def python_call(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a function that calls an operator with less work, and its keyword arguments.

    That is the function of torch's Python interface which is generated from the operator's
    declaration, or the operator itself where none reads all arguments as the operator does.
    """
    if isinstance(operator, torch._ops.OpOverload) and operator.namespace == "aten":
        declared = operator._schema.arguments
        # In a list of tensors the generated function takes no None.
        is_mixed = any("List[Optional[Tensor]]" in str(argument.type) for argument in declared)
        # It reads a default with a name in C++, such as the mean of a loss, as 0.
        named_defaults = {
            argument.name: argument.default_value
            for argument in declared[len(args) :]
            if str(argument.type) == "int" and argument.default_value
        }
        for module in () if is_mixed else (torch._C._VariableFunctions, torch._C._nn):
            function = getattr(module, operator._schema.name.removeprefix("aten::"), None)
            if isinstance(function, types.BuiltinFunctionType):
                return function, {**named_defaults, **kwargs}
    return operator, dict(kwargs)


def has_kernel(operator: torch._ops.OpOverload, key: str) -> bool:
    """Return whether an operator has a kernel of its own for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def has_cpu_kernel(operator: torch._ops.OpOverload) -> bool:
    """Return whether an operator runs on the CPU, by its own kernel or by those of others."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU")


def onednn_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of tensors that oneDNN may work on here, as torch asks it."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return frozenset()
    ask = torch.ops.mkldnn
    bf16, half = ask._is_mkldnn_bf16_supported(), ask._is_mkldnn_fp16_supported()
    return frozenset([torch.float32, *[torch.bfloat16] * bf16, *[torch.half] * half])
