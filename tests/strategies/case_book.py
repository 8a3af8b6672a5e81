"""The case book: random tensors for cases, and the list of all calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.strategies.rule_law import Case

_generator = torch.Generator().manual_seed(0)


def t(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def z(*shape: int) -> Tensor:
    return torch.complex(t(*shape), t(*shape))


def u(*shape: int) -> Tensor:
    """Return numbers between 0.1 and 0.9: inside the domain of every function."""
    return torch.rand(shape, dtype=torch.float64, generator=_generator) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


def operator(name: str) -> Any:
    target: Any = torch.ops.aten
    for part in name.split("."):
        target = getattr(target, part)
    return target if "." in name else getattr(target, target.overloads()[0])


def plain(names: list[str]) -> list[str]:
    return [name.removeprefix("aten.") for name in names]


CASES: list[Case] = []


def case(name: str | Any, *args: Any, tolerance: float = 1e-9, **kwargs: Any) -> None:
    target = operator(name) if isinstance(name, str) else name
    label = name if isinstance(name, str) else name.__name__
    constants, used = kwargs.pop("constants", ()), kwargs.pop("used", None)
    parts = kwargs.pop("parts", ())
    shapes = "x".join(str(tuple(a.shape)).replace(" ", "") for a in args if isinstance(a, Tensor))
    label = f"{label}-{len(CASES)}-{shapes}"
    CASES.append(Case(label, target, args, kwargs, tolerance, constants, used, parts))
