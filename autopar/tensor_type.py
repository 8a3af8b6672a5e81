"""The type of a tensor: shape, dtype and layout, as the program prints it.

>>> TensorType.parse("f32[8@dp, 128, 4096@tp]{+pp}").layout
[@dp, _, @tp]{+pp}
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from autopar.errors import InvalidInput
from autopar.layout import Layout, partial_suffix
from autopar.mesh import Mesh

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
DTYPE_NAMES |= {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in DTYPE_NAMES
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_TYPE = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?:\{(?P<partial>[^}]*)\})?")


@lru_cache(maxsize=1 << 14)
def _most_elements(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> int:
    """Return the number of elements of the largest piece."""
    return math.prod(layout.largest_shape(shape, mesh))


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype and layout of a tensor, printed as `f32[8@dp, 128, 4096@tp]{+pp}`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    @classmethod
    def of(cls, tensor: torch.Tensor, layout: Layout) -> TensorType:
        """Return the type of a tensor with a layout."""
        return cls(tuple(tensor.shape), tensor.dtype, layout)

    @property
    def bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def local_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of the largest piece."""
        return _most_elements(self.layout, self.shape, mesh) * self.dtype.itemsize

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Read a type that `str` has written."""
        match = _TYPE.fullmatch(text.strip())
        if match is None or match["dtype"] not in DTYPES:
            raise InvalidInput(
                "a type is written dtype[size@axis, ...]{+axis}",
                got=repr(text),
                remedy="f32[8@dp, 128, 4096@tp]{+pp}",
            )
        shape, dims = [], []
        for part in filter(None, (part.strip() for part in match["dims"].split(","))):
            size, *axes = part.split("@")
            if not size.isdigit():
                raise InvalidInput(
                    "each dim of a type is size@axis@axis, axes outermost first",
                    got=repr(part),
                    remedy="4096@tp",
                )
            shape.append(int(size))
            dims.append(tuple(axes))
        partial = [axis.strip().removeprefix("+") for axis in (match["partial"] or "").split(",")]
        layout = Layout(*dims, partial=filter(None, partial))
        return cls(tuple(shape), DTYPES[match["dtype"]], layout)

    def __str__(self) -> str:
        dims = ", ".join("@".join((str(n), *a)) for n, a in zip(self.shape, self.layout.dims))
        return f"{DTYPE_NAMES[self.dtype]}[{dims}]{partial_suffix(self.layout.partial)}"
