"""Plain tensors: dense, whole, and computed with by torch's own operators.

What else may be a tensor is refused by name before a program is made of it, or run on it: sparse,
nested and quantized tensors, DTensors, and classes that compute in their own way, as int8 weights
of a library do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch.tensors import plain_attributes
from autopar.capture.graph_builder import FakeTensor
from autopar.errors import InvalidInput

_FUNCTIONS = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    nn.Parameter.__torch_function__,  # none
)
_RULE = "a model is captured, and runs, on plain dense tensors"
_DISPATCH = Tensor.__torch_dispatch__


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one that programs take."""
    kind = type(tensor)
    has_own_class = kind not in (Tensor, nn.Parameter) and computes_by_itself(kind)
    if has_own_class or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized)


def computes_by_itself(kind: type) -> bool:
    """Return whether a class of tensors computes otherwise than torch does."""
    function: Any = kind.__torch_function__  # type: ignore[attr-defined]
    is_usual = getattr(function, "__func__", function) in _FUNCTIONS
    dispatch: Any = kind.__torch_dispatch__  # type: ignore[attr-defined]
    return not issubclass(kind, FakeTensor) and (dispatch is not _DISPATCH or not is_usual)


def require_plain(name: str, tensor: Tensor) -> None:
    """Refuse a parameter, buffer or argument of that name which programs do not take."""
    if is_plain(tensor):
        return
    from torch.distributed.tensor import DTensor

    article = "an" if type(tensor).__name__[0] in "AEIOU" else "a"
    kind, remedy = f"{article} {type(tensor).__name__}", "to_dense() makes a dense one of it"
    with plain_attributes():
        if isinstance(tensor, DTensor):
            remedy = "full_tensor() makes a plain one of it"
        elif tensor.is_nested:
            kind = "a nested tensor"
            remedy = "torch.nested.to_padded_tensor(x, 0.0), and a mask of what is padding"
        elif tensor.layout is not torch.strided:
            kind += f" of layout {tensor.layout}"
        elif tensor.is_quantized:
            kind = f"a quantized tensor ({tensor.dtype})"
            remedy = "dequantize() makes a plain one of it"
        else:
            kind += ", which computes in its own way"
            remedy = (
                "dequantize it, or make a plain tensor of it otherwise; or keep what it consists "
                "of (whole numbers and their scales) as plain tensors, and compute with them in "
                "forward"
            )
    raise InvalidInput(_RULE, got=f"{name}, {kind}", remedy=remedy)


def require_plain_attributes(path: str, module: nn.Module) -> None:
    """Refuse a module that keeps weights in an object of TorchScript, as torch.ao packs them."""
    for name, value in vars(module).items():
        if isinstance(value, torch.ScriptObject):
            raise InvalidInput(
                _RULE,
                got=f"{path}.{name}, an object of TorchScript in which weights are packed",
                remedy="the model as it was before it was quantized",
            )
