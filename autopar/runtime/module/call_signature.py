"""Call signature: the facts of a call that decide its program, as a readable dictionary key.

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

from autopar.tensor_type import DTYPE_NAMES
from autopar.text.source_lines import shorten
from autopar.text.units import counted


@dataclass(frozen=True)
class CallSignature:
    """The structure, shapes, values and modes of one call."""

    structure: str  # of the arguments
    names: tuple[str, ...]  # of the flat arguments
    values: tuple[Hashable, ...]  # tensors: shape, dtype and need of a gradient
    training: tuple[bool, ...]  # modes of all modules
    unfrozen: frozenset[str]  # parameters that were frozen when the module was planned
    is_step: bool
    frozen: frozenset[str] = frozenset()  # that learned then, if forward asks which learn

    @classmethod
    def of(
        cls,
        args: tuple,
        kwargs: Mapping[str, Any],
        training: tuple[bool, ...],
        unfrozen: frozenset[str],
        *,
        is_step: bool,
        frozen: frozenset[str] = frozenset(),
    ) -> CallSignature:
        """Return the signature of a call with these arguments."""
        named = {name: kwargs[name] for name in sorted(kwargs)}
        paths, spec = pytree.tree_flatten_with_path((args, named))
        names = tuple(_name(path) for path, _ in paths)
        values = tuple(_value(leaf) for _, leaf in paths)
        return cls(str(spec), names, values, training, unfrozen, is_step, frozen)

    @property
    def message(self) -> str:
        """Return the signature for other ranks as JSON: a text, a digest without shapes and
        parameters, then these two."""
        values = [replace(v, shape=()) if isinstance(v, _TensorKey) else v for v in self.values]
        modes = self.training, self.is_step, sorted(self.frozen)
        others = (self.structure, self.names, values, *modes)
        digest = hashlib.sha256(repr(others).encode()).hexdigest()[:16]
        shapes = [v.shape if isinstance(v, _TensorKey) else () for v in self.values]
        return json.dumps([str(self), digest, shapes, sorted(self.unfrozen)])

    def differing_dims(self, other: CallSignature) -> tuple[tuple[int, int], ...] | None:
        """Return the dims of flat arguments in which two calls differ; None if in more than sizes.

        Empty where they do not differ."""
        if replace(self, values=()) != replace(other, values=()):
            return None
        dims: list[tuple[int, int]] = []
        for at, (first, second) in enumerate(zip(self.values, other.values, strict=True)):
            if first == second:
                continue
            if not isinstance(first, _TensorKey) or not isinstance(second, _TensorKey):
                return None
            sizes = list(zip(first.shape, second.shape))
            if replace(first, shape=second.shape) != second or len(sizes) != len(first.shape):
                return None
            dims += [(at, dim) for dim, (a, b) in enumerate(sizes) if a != b]
        return tuple(dims)

    @cached_property
    def text(self) -> str:
        """Return the arguments as a text."""
        pairs = zip(self.names, self.values)
        return f"({', '.join(f'{name}: {v}' if name else str(v) for name, v in pairs)})"

    @cached_property
    def mode(self) -> str:
        """Return the training modes in a word or two."""
        if not self.training:
            return ""
        is_training = self.training[0]
        word, other = ("training", "evaluation") if is_training else ("evaluation", "training")
        count = sum(mode != is_training for mode in self.training)
        return f"{word}, {counted(count, 'module')} in {other}" if count else word

    def __str__(self) -> str:
        learns = f", {counted(len(self.unfrozen), 'parameter')} unfrozen" if self.unfrozen else ""
        learns += f", {counted(len(self.frozen), 'parameter')} frozen" if self.frozen else ""
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
    """An argument that is no tensor: True differs from 1, and nan equals itself."""

    kind: type
    text: str

    def __str__(self) -> str:
        return shorten(self.text)


def changing_values(
    signatures: Sequence[CallSignature], forward: Callable[..., Any]
) -> tuple[str, ...]:
    """Return the arguments of `forward`, by name, whose values that are no tensors differ."""
    first, parameters = signatures[0], [*inspect.signature(forward).parameters]
    similar = [signature for signature in signatures if signature.structure == first.structure]
    columns = zip(*(signature.values for signature in similar))
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
    """Return the name of a keyword argument, with the path inside of containers."""
    (first, at, *inside) = path
    is_named = getattr(first, "idx", 0) == 1
    return (f"{at.key}" if is_named else "") + pytree.keystr(tuple(inside))
