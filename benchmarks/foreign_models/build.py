"""How models of other packages are built: by the path of their class, with a batch.

>>> new("torch.nn:Linear", 4, 8)
Linear(in_features=4, out_features=8, bias=True)

Modules are imported when a model is built, so that a package that is not installed costs its own
models alone.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 4, 16, 32


class Built:
    """A model with a batch to call it with."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs


Build = Callable[[], Built]


def load(path: str) -> Any:
    """Return what a path `module:name` names."""
    module, _, name = path.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def new(path: str, *args: Any, **kwargs: Any) -> Any:
    """Return what the class or function at a path makes of these arguments."""
    return load(path)(*args, **kwargs)


def rows(*shape: int) -> Tensor:
    """Return a batch of normal numbers, each sample of this shape."""
    return torch.randn(BATCH, *shape)


def images(size: int = 32, channels: int = 3) -> Tensor:
    return rows(channels, size, size)


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(1, vocabulary, (BATCH, length))


class Call(nn.Module):
    """A module that is called by a function of it and its inputs."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)
