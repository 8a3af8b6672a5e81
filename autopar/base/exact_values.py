"""Exact values: plain values that no code can tell apart.

>>> [is_same_value(-0.0, 0.0), is_same_value(True, 1), is_same_value(float("nan"), float("nan"))]
[False, False, True]
"""

from __future__ import annotations

import struct
from numbers import Number
from typing import Any

import torch
from torch import Tensor


def is_same_value(value: Any, other: Any) -> bool:
    """Return whether two values are of one class and equal, numbers to the last bit."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) is float:
        return struct.pack("d", value) == struct.pack("d", other)
    if type(value) is complex:
        parts = (value.real, value.imag), (other.real, other.imag)
        return struct.pack("2d", *parts[0]) == struct.pack("2d", *parts[1])
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(is_same_value, value, other))
    is_shown_alike = not isinstance(value, Number) or repr(value) == repr(other)
    return is_shown_alike and bool(value == other or (value != value and other != other))


@torch.no_grad()
def is_same_tensor(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are of one dtype and equal, zeros by their signs."""
    if tensor.dtype != other.dtype or not torch.equal(tensor, other):
        return False
    return not tensor.is_floating_point() or torch.equal(tensor.signbit(), other.signbit())
