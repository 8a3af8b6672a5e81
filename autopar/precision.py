"""Precision: the dtypes in which a program computes, sums gradients and keeps parameters.

>>> precision = Precision(compute=torch.bfloat16, reduce=torch.float32)
>>> precision.master_of(torch.bfloat16), precision.master_of(torch.float64)
(torch.float32, torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from autopar.errors import InvalidInput
from autopar.tensor_type import DTYPE_NAMES, DTYPES

Name = Literal["bf16", "f16", "f32", "f64"]
COMPUTE = tuple(DTYPES[name] for name in get_args(Name))


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a program computes and sums gradients; parameters are kept as masters.

    Masters have at least the precision of float32. Inputs that are floating point are cast to
    `compute`, buffers are not.

    Attributes:
        compute: The dtype of the copies of parameters that the program reads.
        reduce: The dtype in which gradients are summed over ranks and micro-batches.
        loss_scale: "dynamic" scales the loss up so that small gradients of float16 do not vanish. A
            step in which one overflows gives no gradients, on any rank. None: no scale.
    """

    FORM: ClassVar = tuple[Name, Name, Literal["dynamic"] | None]  # in files
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    loss_scale: Literal["dynamic"] | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            dtype = getattr(self, name)
            if dtype not in COMPUTE:
                raise InvalidInput(
                    "a program computes and sums in a floating-point dtype that torch trains in",
                    got=f"{name}={dtype!r}",
                    remedy=f"one of {', '.join(map(str, COMPUTE))}",
                )
        if self.loss_scale not in (None, "dynamic"):
            raise InvalidInput(
                "the scale of the loss is found while training, or there is none",
                got=f"loss_scale={self.loss_scale!r}",
                remedy='loss_scale="dynamic", or None',
            )

    def to_form(self) -> tuple[object, ...]:
        return DTYPE_NAMES[self.compute], DTYPE_NAMES[self.reduce], self.loss_scale

    @classmethod
    def of_form(cls, form: tuple) -> Precision:
        compute, reduce, loss_scale = form
        return cls(DTYPES[compute], DTYPES[reduce], loss_scale)

    def __str__(self) -> str:
        scaled = ", a scaled loss" if self.loss_scale else ""
        names = DTYPE_NAMES[self.compute], DTYPE_NAMES[self.reduce]
        return f"computes in {names[0]}, sums gradients in {names[1]}{scaled}"

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter that a model has in `dtype` is kept."""
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
