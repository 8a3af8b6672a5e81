"""Signature: what of a call makes its program, as a value that finds it again and that reads well.

(x: f32[8, 32], labels: i64[8]), step
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.layout import DTYPE_NAMES
from autopar.text.source_lines import shorten
from autopar.text.units import counted


@dataclass(frozen=True)
class CallSignature:
    """Of one call."""

    structure: str  # of its arguments
    names: tuple[str, ...]  # of these, flat
    values: tuple[Hashable, ...]  # tensors by shape and dtype, and whether they need a gradient
    training: tuple[bool, ...]  # modes of all modules
    unfrozen: frozenset[str]  # parameters that learn now, and did not when it was planned
    is_step: bool

    @classmethod
    def of(
        cls,
        args: tuple,
        kwargs: Mapping[str, Any],
        training: tuple[bool, ...],
        unfrozen: frozenset[str],
        is_step: bool,
    ) -> CallSignature:
        named = {name: kwargs[name] for name in sorted(kwargs)}
        paths, spec = pytree.tree_flatten_with_path((args, named))
        names = tuple(_name(path) for path, _ in paths)
        values = tuple(_value(leaf) for _, leaf in paths)
        return cls(str(spec), names, values, training, unfrozen, is_step)

    @property
    def said(self) -> str:
        """What a rank says of it to others: in words, all but the shapes and parameters in short,
        and these."""
        values = [replace(v, shape=()) if isinstance(v, _TensorKey) else v for v in self.values]
        rest = (self.structure, self.names, values, self.training, self.is_step)
        short = hashlib.sha256(repr(rest).encode()).hexdigest()[:16]
        shapes = [v.shape if isinstance(v, _TensorKey) else () for v in self.values]
        return json.dumps([str(self), short, shapes, sorted(self.unfrozen)])

    @cached_property
    def text(self) -> str:
        """The arguments."""
        pairs = zip(self.names, self.values)
        return f"({', '.join(f'{name}: {v}' if name else str(v) for name, v in pairs)})"

    @cached_property
    def mode(self) -> str:
        """The modes in a word or two."""
        if not self.training:
            return ""
        is_training = self.training[0]
        word, other = ("training", "evaluation") if is_training else ("evaluation", "training")
        count = sum(mode != is_training for mode in self.training)
        return f"{word}, {counted(count, 'module')} in {other}" if count else word

    def __str__(self) -> str:
        learns = f", {counted(len(self.unfrozen), 'parameter')} unfrozen" if self.unfrozen else ""
        return f"{'step' if self.is_step else 'call'}{self.text} in {self.mode} mode{learns}"


@dataclass(frozen=True)
class _TensorKey:
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def __str__(self) -> str:
        learns = " with gradient" if self.needs_gradient else ""
        sizes = ", ".join(map(str, self.shape))
        return f"{DTYPE_NAMES.get(self.dtype, self.dtype)}[{sizes}]{learns}"


@dataclass(frozen=True)
class _ValueKey:
    """What is no tensor: True is another value than 1, and nan is what it is."""

    kind: type
    said: str

    def __str__(self) -> str:
        return shorten(self.said)


def changing_values(
    signatures: Sequence[CallSignature], forward: Callable[..., Any]
) -> tuple[str, ...]:
    """Return the arguments of `forward`, by name, whose values that are no tensors differ."""
    first, parameters = signatures[0], [*inspect.signature(forward).parameters]
    others = [one for one in signatures if one.structure == first.structure]
    columns = zip(*(one.values for one in others))
    return tuple(
        name or (parameters[place] if place < len(parameters) else f"argument {place + 1}")
        for place, (name, column) in enumerate(zip(first.names, columns))
        if isinstance(column[0], _ValueKey) and len({*column}) > 1
    )


def _value(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return _ValueKey(type(leaf), repr(leaf))
    needs = leaf.requires_grad and torch.is_grad_enabled()
    return _TensorKey(tuple(leaf.shape), leaf.dtype, needs)


def _name(path: Any) -> str:
    """Of keyword arguments, and of what is in containers."""
    (first, at, *inside) = path
    is_named = getattr(first, "idx", 0) == 1
    return (f"{at.key}" if is_named else "") + pytree.keystr(tuple(inside))
