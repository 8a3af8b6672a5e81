"""What is private in torch of the forms of fake tensors, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import _meta_registrations as forms


@contextmanager
def grouped_products_of_floats() -> Iterator[None]:
    """Within, `torch._grouped_mm` of fake tensors takes the dtypes that its kernels take, too."""
    plain = forms._meta_grouped_mm_common

    def form(left: Tensor, right: Tensor, *others: Any, **named: Any) -> Any:
        if {left.dtype, right.dtype} not in ({torch.float32}, {torch.float16}):
            return plain(left, right, *others, **named)
        offs, dtype = named.get("offs"), named.get("out_dtype") or left.dtype
        rows = [len(offs)] if left.ndim == right.ndim == 2 and offs is not None else []
        rows = [len(left)] if left.ndim == right.ndim == 3 else rows
        return left.new_empty([*rows, left.shape[-2], right.shape[-1]], dtype=dtype)

    forms._meta_grouped_mm_common = form  # type: ignore[assignment]
    try:
        yield
    finally:
        forms._meta_grouped_mm_common = plain
