"""Learning queries: whether forward asks which tensors take a gradient.

    if self.head.weight.requires_grad:     goes another way once the user freezes the parameter

A program of such a forward is that of the parameters that learned when it was captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.hooks import while_it_runs

_ON_THE_WAY = ("__torch_function__", "__get__")  # from who asks to the answer
_OF_LEARNING = {"requires_grad", "is_leaf", "grad_fn"}


def function_name(function: Any) -> str:
    """Return the name of a function of torch, or of the attribute that it reads or sets."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, property):  # as hooks.py puts it around an attribute
        owner = getattr(owner.fget, "__self__", owner.fget)
    return str(getattr(owner, "__name__", None) or getattr(function, "__name__", ""))


@contextmanager
def learning_queries_noted(model: nn.Module, noted: list[str]) -> Iterator[None]:
    """While forward is followed, note by name what it asks of how tensors learn."""
    with while_it_runs(model, partial(_Noting, noted)):
        yield


class _Noting(TorchFunctionMode):
    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := function_name(function)) in _OF_LEARNING and not _capture_asks():
            self._noted.append(name)
        return function(*args, **(kwargs or {}))


def _capture_asks() -> bool:
    """Return whether capture itself asks, which compares blocks while forward runs."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _ON_THE_WAY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("autopar.capture.")
