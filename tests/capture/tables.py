"""Tables that functions of a file keep, for the models of test_caches.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

BY_COUNT: dict[int, Any] = {}
LAST: Tensor | None = None


@cache
def pair(count: int) -> tuple[Tensor, Tensor]:
    return torch.arange(count) * 2.0, torch.ones(count)


def by_count(count: int) -> Tensor:
    if count not in BY_COUNT:
        BY_COUNT[count] = {"places": [torch.arange(count) * 3.0]}
    return BY_COUNT[count]["places"][0]


def last(count: int) -> Tensor:
    global LAST
    if LAST is None:
        LAST = torch.arange(count) * 4.0
    return LAST


def remembered(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    cached = cache(function)

    @wraps(function)
    def call(count: int) -> Tensor:
        return cached(count)

    return call


@remembered
def wrapped(count: int) -> Tensor:
    return torch.arange(count) * 5.0
