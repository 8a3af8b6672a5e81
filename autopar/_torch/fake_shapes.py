"""Private corners of torch that compute the shapes of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import _meta_registrations as shape_functions


@contextmanager
def grouped_products_of_floats() -> Iterator[None]:
    """Let `torch._grouped_mm` of fake tensors take all dtypes that its kernels take."""
    plain = shape_functions._meta_grouped_mm_common

    def product(left: Tensor, right: Tensor, *others: Any, **named: Any) -> Any:
        if {left.dtype, right.dtype} not in ({torch.float32}, {torch.float16}):
            return plain(left, right, *others, **named)
        offs, dtype = named.get("offs"), named.get("out_dtype") or left.dtype
        rows = [len(offs)] if left.ndim == right.ndim == 2 and offs is not None else []
        rows = [len(left)] if left.ndim == right.ndim == 3 else rows
        return left.new_empty([*rows, left.shape[-2], right.shape[-1]], dtype=dtype)

    shape_functions._meta_grouped_mm_common = product  # type: ignore[assignment]
    try:
        yield
    finally:
        shape_functions._meta_grouped_mm_common = plain
