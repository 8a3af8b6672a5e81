"""Dynamic: which sizes of the inputs may vary, and in what range, as torch.export is told it.

    batch = torch.export.Dim("batch", min=1, max=64)
    declared = read_dynamic(model, (ids,), {}, {"ids": {0: batch}})
    declared.require(model, (other,), {})       # refuses sizes that are not in the range

Inputs go by their names in forward, `ids` or `pair[0]`, however a call hands them over. A size is
`times * root + plus`: dims of one name have one root, and one that is derived follows its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import DeclaredDim, declared_dim
from autopar.base.schema import Index, Size
from autopar.errors import InvalidInput
from autopar.text.source_lines import shorten
from autopar.text.units import counted

_RULE = "dynamic_shapes says of inputs, nested as these are, which dims vary, as torch.export takes"
_REMEDY = 'by name, as {"ids": {0: torch.export.Dim("batch", max=64)}}, or in order, as ({0: ...},)'
_OUTSIDE = "inputs have sizes in the range that dynamic_shapes declares"


@dataclass(frozen=True)
class Range:
    """The sizes that may come."""

    least: Size = 1
    most: Size | None = None

    def __str__(self) -> str:
        return f"from {self.least}" if self.most is None else f"{self.least} to {self.most}"

    def holds(self, size: int) -> bool:
        return size >= self.least and (self.most is None or size <= self.most)


@dataclass(frozen=True)
class VaryingDim:
    """One dim of one input."""

    input: str  # its name in forward
    dim: Index
    root: str  # that its size follows
    times: Size
    plus: int
    example: Size  # what it is in the call that was planned

    def __str__(self) -> str:
        return f"dim {self.dim} of {self.input}"

    @property
    def formula(self) -> str:
        """Its size."""
        times = f"{self.times}*" if self.times > 1 else ""
        plus = f"{self.plus:+d}" if self.plus else ""
        return f"{times}{self.root}{plus}"


@dataclass(frozen=True)
class DynamicShapes:
    """The dims of inputs that vary, and the ranges of what their sizes follow."""

    dims: tuple[VaryingDim, ...]
    ranges: Mapping[str, Range]

    def __str__(self) -> str:
        return ", ".join(f"{root} {sizes}" for root, sizes in self.ranges.items())

    @cached_property
    def of_inputs(self) -> dict[str, dict[int, VaryingDim]]:
        """By input and dim."""
        found: dict[str, dict[int, VaryingDim]] = {}
        for one in self.dims:
            found.setdefault(one.input, {})[one.dim] = one
        return found

    def require(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of a call; refused if they are outside, or do not agree."""
        known: dict[str, tuple[int, VaryingDim]] = {}
        for name, value in named_inputs(model, args, kwargs).items():
            for one in self.of_inputs.get(name, {}).values():
                if isinstance(value, Tensor) and one.dim < value.ndim:
                    self._require_size(one, value.shape[one.dim], known)
        return {root: size for root, (size, _) in known.items()}

    def _require_size(
        self, one: VaryingDim, size: int, known: dict[str, tuple[int, VaryingDim]]
    ) -> None:
        given, sizes = (size - one.plus) // one.times, self.ranges[one.root]
        is_whole = given * one.times + one.plus == size
        if not is_whole or not sizes.holds(given):
            said = "" if one.formula == one.root == str(one) else f", which is {one.formula}"
            raise InvalidInput(
                _OUTSIDE,
                got=f"a size of {size} in {one}{said}, where {one.root} is {sizes}",
                remedy="a size in the range, or parallelize again with another range",
            )
        before, other = known.setdefault(one.root, (given, one))
        if before != given:
            raise InvalidInput(
                "dims that dynamic_shapes gives one name have one size",
                got=f"{one.root} is {before} by {other}, and {given} by {one}",
                remedy="inputs that agree, or parallelize again with dims of two names",
            )

    def across(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
        """What is the same of all calls that differ in these sizes alone."""
        found: list[Hashable] = []
        for name, value in named_inputs(model, args, kwargs).items():
            if not isinstance(value, Tensor):
                found.append((name, type(value), repr(value)))
                continue
            varies = self.of_inputs.get(name, {})
            pairs = enumerate(value.shape)
            sizes = tuple(varies[dim].formula if dim in varies else size for dim, size in pairs)
            needs = value.requires_grad and torch.is_grad_enabled()
            found.append((name, value.dtype, (sizes, needs)))
        return tuple(found)

    @cached_property
    def planned(self) -> dict[str, int]:
        """The sizes of the call that was planned, by what those of inputs follow."""
        return {one.root: (one.example - one.plus) // one.times for one in self.dims}

    def ends(self, most: int) -> list[dict[str, int]]:
        """The smallest sizes, and the largest, or so many times those that were planned."""
        least = {root: self.ranges[root].least for root in self.planned}
        for one in self.dims:  # none of them is empty
            least[one.root] = max(least[one.root], -((one.plus - 1) // one.times))
        largest = {root: size * most for root, size in self.planned.items()}
        known = ((root, self.ranges[root].most) for root in largest)
        largest |= {root: min(largest[root], end) for root, end in known if end is not None}
        return [least, largest]

    def as_planned(
        self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[tuple, Mapping[str, Any]]:
        """A call with the sizes of the one that was planned, where it has others of the range."""
        self.require(model, args, kwargs)

        def empty(value: Tensor, sizes: Sequence[int]) -> Tensor:
            return torch.empty(sizes, dtype=value.dtype, device=value.device)

        return self._with_sizes(self.planned, empty, model, args, kwargs)

    def repeated(
        self, sizes: Mapping[str, int], model: nn.Module, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[tuple, Mapping[str, Any]]:
        """A call of other sizes, of the numbers that this one has: the first ones, or again."""

        def again(value: Tensor, sizes: Sequence[int]) -> Tensor:
            value = value.detach()
            for dim, size in enumerate(sizes):
                at = torch.arange(size, device=value.device) % value.shape[dim]
                value = value.index_select(dim, at)
            return value

        return self._with_sizes(sizes, again, model, args, kwargs)

    def _with_sizes(
        self,
        sizes: Mapping[str, int],
        make: Callable[[Tensor, Sequence[int]], Tensor],
        model: nn.Module,
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple, Mapping[str, Any]]:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        places = pytree.tree_unflatten(range(len(leaves)), spec)
        for name, place in named_inputs(model, *places).items():
            value, varies = leaves[place], self.of_inputs.get(name, {})
            if not isinstance(value, Tensor):
                continue
            wanted = list(value.shape)
            for dim, one in varies.items():
                wanted[dim] = one.times * sizes[one.root] + one.plus
            if wanted != list(value.shape):
                leaves[place] = make(value, wanted).requires_grad_(value.requires_grad)
        return pytree.tree_unflatten(leaves, spec)


def named_inputs(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call hands in, by name in forward and place in what contains it."""
    found = {}
    for name, argument in _arguments(model, args, kwargs).items():
        for path, value in pytree.tree_flatten_with_path(argument)[0]:
            found[name + pytree.keystr(path)] = value
    return found


def read_dynamic(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any], given: Any
) -> DynamicShapes | None:
    """What the user says of the inputs of a call; None if nothing varies."""
    arguments = _arguments(model, args, kwargs)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in arguments]:
            names = ", ".join(arguments)
            got = f"{', '.join(map(repr, unknown))}; the example call has {names}"
            raise _wrong(got)
        unsaid = [name for name, value in arguments.items() if name not in given and _holds(value)]
        if given and unsaid:
            raise InvalidInput(
                "dynamic_shapes says of every input with tensors whether its sizes vary",
                got=f"nothing of {', '.join(unsaid)}",
                remedy=f"say None of what does not vary: {{..., {unsaid[0]!r}: None}}",
            )
        pairs = [(name, spec, arguments[name]) for name, spec in given.items()]
    else:
        if len(given) != len(arguments):
            got = f"{len(given)} entries for the inputs {', '.join(arguments)} of the example call"
            raise _wrong(got)
        pairs = [(name, spec, arguments[name]) for spec, name in zip(given, arguments)]
    dims: list[VaryingDim] = []
    ranges: dict[str, Range] = {}
    for one, sizes in (found for name, spec, value in pairs for found in _walk(name, spec, value)):
        if ranges.setdefault(one.root, sizes) != sizes:
            got = f"{one.root} is {ranges[one.root]}, and {sizes} in {one}"
            raise InvalidInput(
                "dims of one name have one range", got=got, remedy="use one Dim for all of them"
            )
        dims.append(one)
    declared = DynamicShapes(tuple(dims), ranges)
    declared.require(model, args, kwargs)
    return declared if dims else None


def _arguments(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call by their names in forward; keywords that it has no names for by their own."""
    signature = inspect.signature(model.forward)
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        is_rest = signature.parameters[name].kind is Parameter.VAR_KEYWORD
        found |= value if is_rest else {name: value}
    return found


def _holds(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _walk(name: str, spec: Any, value: Any) -> Iterator[tuple[VaryingDim, Range]]:
    """What is said of an argument, or of what it contains."""
    if spec is None:
        return
    if isinstance(value, Tensor):
        for dim, entry in _entries(name, spec, value):
            declared = _declared(name, dim, entry, value.shape[dim])
            if declared is not None:
                root, times, plus, least, most = declared
                one = VaryingDim(name, dim, root, times, plus, example=value.shape[dim])
                yield one, Range(max(1, least), most)
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        if unknown := [key for key in spec if key not in value]:
            raise _wrong(f"{', '.join(map(repr, unknown))} in {name}, which has {list(value)}")
        for key, inner in spec.items():
            yield from _walk(f"{name}[{key!r}]", inner, value[key])
    elif isinstance(value, list | tuple) and isinstance(spec, list | tuple):
        if len(spec) != len(value):
            raise _wrong(f"{len(spec)} entries for {name}, which has {len(value)}")
        for index, (inner, item) in enumerate(zip(spec, value)):
            yield from _walk(f"{name}[{index}]", inner, item)
    else:
        raise _wrong(f"{shorten(repr(spec))} for {name}, of type {type(value).__name__}")


def _entries(name: str, spec: Any, value: Tensor) -> list[tuple[int, Any]]:
    """What is said of the dims of a tensor."""
    if isinstance(spec, Mapping):
        pairs = list(spec.items())
        if all(isinstance(dim, int) and 0 <= dim < value.ndim for dim, _ in pairs):
            return pairs
    elif isinstance(spec, list | tuple) and len(spec) == value.ndim:
        return list(enumerate(spec))
    raise _wrong(f"{shorten(repr(spec))} for {name}, a tensor of {counted(value.ndim, 'dim')}")


def _declared(name: str, dim: int, entry: Any, size: int) -> DeclaredDim | None:
    """What is said of one dim; None if it does not vary."""
    if entry is None:
        return None
    if isinstance(entry, int) and not isinstance(entry, bool):
        if entry != size:
            raise _wrong(f"{entry} for dim {dim} of {name}, which has a size of {size}")
        return None
    try:
        return declared_dim(entry, f"dim {dim} of {name}")
    except TypeError:
        got = f"{shorten(repr(entry))} for dim {dim} of {name}"
        raise InvalidInput(
            "a dim is said to vary by a torch.export.Dim, Dim.DYNAMIC or Dim.AUTO, and by None, "
            "Dim.STATIC or its size not to",
            got=got,
            remedy='torch.export.Dim("batch", min=1, max=64)',
        ) from None


def _wrong(got: str) -> InvalidInput:
    return InvalidInput(_RULE, got=got, remedy=_REMEDY)
