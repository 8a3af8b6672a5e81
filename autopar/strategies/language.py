"""The language of rules: one line that names the factors of every tensor.

    "... i, o i -> ... o"                 linear: i is contracted
    "b h q d!, b h k! d!, b h k! d! -> b h q d!"   attention: d and k stay whole
    "n (h d) -> n h d"                    a reshape: the outer part of a group can be cut
    "n+ c ...+, c -> two c"               n and ... are summed although the shift lacks them
    "... h! -> ... h!, ..."               two results: the rows, and a number for each

Tensors are parted by commas, dims by blanks; a tensor without dims is written as nothing. `!` marks
a factor (or a group, or `...`) that stays whole. `+` marks one that is summed out although some
input lacks it: the output is the sum over the pieces. `...` stands for unnamed dims d0, d1, ...,
aligned from the right and broadcast: a dim of size 1 has no factor. Last inputs may be absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypedDict, Unpack

import torch

from autopar.errors import InvalidInput
from autopar.strategies.kernels import KERNELS
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, product

Shape = Sequence[int]
Passes = str | Iterable[Iterable[int]]
Flops = float | Callable[[Mapping[str, int]], float]
ELLIPSIS = "..."
_ELLIPSIS_FACTOR = re.compile(r"d\d+")  # a dim of `...`
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|[()!+])")


@dataclass(frozen=True)
class Pattern:
    """A line that is read, without sizes; the dim `("...",)` stands for any number of dims."""

    text: str
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    whole: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()

    @classmethod
    def read(cls, text: str) -> Pattern:
        """Read a line; raise InvalidInput where it is malformed."""
        if text.count("->") != 1:
            raise _malformed(text, "it has exactly one '->'")
        whole: set[str] = set()
        sums: set[str] = set()
        left, right = text.split("->")
        inputs = tuple(_read_tensor(part, text, whole, sums) for part in left.split(","))
        outputs = tuple(_read_tensor(part, text, whole, sums) for part in right.split(","))
        if not left.strip():
            inputs = ()
        known = {name for dims in inputs for dim in dims for name in dim}
        if ELLIPSIS not in known and any((ELLIPSIS,) in dims for dims in outputs) and inputs:
            raise _malformed(text, "'...' of an output must also stand in an input")
        return cls(text, inputs, outputs, frozenset(whole), frozenset(sums))


class Options(TypedDict, total=False):
    """The facts that a line does not say.

    An operator is a product if its `flops` are given, or if it has no `cost` and sums over a factor
    that two inputs share, as `i` above.
    """

    sizes: Mapping[str, int] | None  # of factors that shapes do not determine
    # "all" (the inputs may be partial sums together), "each" (one at a time) or sets of inputs.
    passes: Passes
    kernels: Mapping[str, str] | None  # by factor, what cutting it needs
    even: Iterable[str]  # factors that are cut only into equal pieces
    flops: Flops | None  # a number or a function of the sizes
    # Without `flops`: FLOPs of each point of all factors, twice if any is contracted.
    cost: float | None
    # What autograd keeps, as in "0 2 output". A product that passes "each" keeps a factor only if
    # another one learns.
    saved: str
    # Further tensors that it keeps, by factors: "n h, int64: n" are one of the output's dtype and
    # one of int64.
    extra: str


def validate_options(pattern: Pattern, options: Options) -> None:
    """Refuse options that name nothing of the line: they would be ignored."""
    known = _factors(pattern.inputs + pattern.outputs)
    saved = _factors(extra.dims for extra in _extras(options))
    inputs, passes = range(len(pattern.inputs)), options.get("passes", ())

    def refuse(requirement: str, got: object, remedy: str) -> NoReturn:
        raise InvalidInput(requirement, got=f"{got!r} with {pattern.text!r}", remedy=remedy)

    def require_factors(option: str, names: Iterable[str], factors: set[str]) -> None:
        for name in names:
            if name not in factors and not (ELLIPSIS in known and _ELLIPSIS_FACTOR.fullmatch(name)):
                refuse(f"{option}= of a rule names factors of its line", name, "name one of them")

    kernels = options.get("kernels") or {}
    require_factors("kernels", kernels, known)
    require_factors("even", options.get("even", ()), known)
    require_factors("sizes", options.get("sizes") or {}, known | saved)
    for kernel in kernels.values():
        if kernel not in KERNELS:
            refuse("kernels= of a rule gives known ones", kernel, f"one of {', '.join(KERNELS)}")
    for members in () if isinstance(passes, str) else passes:
        if not isinstance(members, Iterable) or not all(number in inputs for number in members):
            rule = "passes= of a rule has sets of inputs, by their numbers"
            refuse(rule, members, "passes=[(0,)] for the first")
    for word in options.get("saved", "").split():
        if word != "output" and not (word.isdecimal() and int(word) in inputs):
            rule = "saved= of a rule has inputs, by their numbers, and the output"
            refuse(rule, word, 'saved="0 output", say')


def _factors(tensors: Iterable[Sequence[Dim]]) -> set[str]:
    return {factor for dims in tensors for dim in dims for factor in dim}


def parse(
    text: str | Pattern,
    input_shapes: Sequence[Shape],
    output_shapes: Sequence[Shape] | None = None,
    *,
    slots: Sequence[int] | None = None,
    source: str | None = None,
    **options: Unpack[Options],
) -> Rule:
    """Return the rule of one call: a line given the shapes of that call.

    `slots` says which of the line's inputs are present; None: the first ones.

    >>> rule = parse("... i, o i -> ... o", ((8, 4, 16), (32, 16)))
    >>> rule.inputs[0], dict(rule.sizes)
    ((('d0',), ('d1',), ('i',)), {'d0': 8, 'd1': 4, 'i': 16, 'o': 32})
    """
    pattern = Pattern.read(text) if isinstance(text, str) else text
    present = range(len(input_shapes)) if slots is None else slots
    sizes = dict(options.get("sizes") or {})
    binding = _Binding(pattern, input_shapes, output_shapes, sizes, source)
    if len(present) != len(input_shapes) or any(slot >= len(pattern.inputs) for slot in present):
        raise binding.unfit("names every tensor input")
    dims_of_inputs = [pattern.inputs[slot] for slot in present]
    binding.collect(dims_of_inputs)
    inputs = tuple(binding.dims(dims, shape) for dims, shape in zip(dims_of_inputs, input_shapes))
    outputs = tuple(
        binding.dims(dims, None if output_shapes is None else output_shapes[index])
        for index, dims in enumerate(pattern.outputs)
    )
    factors = {factor for tensor in inputs + outputs for dim in tensor for factor in dim}
    factor_sizes = {
        name: size for name, size in binding.sizes.items() if size > 1 or name in factors
    }
    contracted = factors - {factor for tensor in outputs for dim in tensor for factor in dim}
    # A factor of size 1 counts, too.
    multiplies = options.get("cost") is None and _is_product(dims_of_inputs, pattern.outputs)
    is_doubled = multiplies or (bool(contracted) and len(inputs) > 1)
    flops = _flops(options, factor_sizes, is_doubled=is_doubled)
    passes = _read_passes(options.get("passes", ()), len(inputs), present)
    kernels = options.get("kernels") or {}
    return Rule(
        inputs=inputs,
        outputs=outputs,
        sizes=factor_sizes,
        whole=binding.names(pattern.whole),
        even=frozenset(options.get("even", ())),
        passes=passes,
        kernels={f: name for f, name in kernels.items() if factor_sizes.get(f, 1) > 1},
        flops=flops,
        product=multiplies if options.get("flops") is None else flops > 0,
        text=pattern.text,
        sums=binding.names(pattern.sums),
        gathered=frozenset(f for f, name in kernels.items() if KERNELS[name].expand is not None),
        saved=_saved(options, binding, present, passes),
    )


def _flops(options: Options, sizes: Mapping[str, int], *, is_doubled: bool) -> float:
    flops, cost = options.get("flops"), options.get("cost")
    if flops is not None:
        return flops(sizes) if callable(flops) else float(flops)
    return (1.0 if cost is None else cost) * product(sizes) * (2 if is_doubled else 1)


def _saved(
    options: Options,
    binding: _Binding,
    present: Sequence[int],
    passes: Sequence[frozenset[int]],
) -> Saved:
    words = options.get("saved", "").split()
    positions = {slot: index for index, slot in enumerate(present)}
    slots = [int(word) for word in words if word != "output"]
    factors = frozenset(i for members in passes if len(members) == 1 for i in members)
    return Saved(
        tuple(positions[slot] for slot in slots if slot in positions),
        "output" in words,
        tuple(ExtraTensor(binding.dims(dims, None), dtype) for dims, dtype in _extras(options)),
        factors if len(factors) > 1 else frozenset(),
    )


@dataclass
class _Binding:
    """The sizes of a line's factors, found from shapes."""

    pattern: Pattern
    input_shapes: Sequence[Shape]
    output_shapes: Sequence[Shape] | None
    sizes: dict[str, int]
    source: str | None
    hidden: tuple[str, ...] = ()  # the factors of `...`

    def collect(self, used: Sequence[tuple[Dim, ...]]) -> None:
        """Find every size; raise InvalidInput where shapes disagree."""
        tensors = list(zip(used, self.input_shapes))
        if self.output_shapes is not None:
            if len(self.output_shapes) != len(self.pattern.outputs):
                raise self.unfit("names every output")
            tensors += zip(self.pattern.outputs, self.output_shapes)
        lengths = [
            self.hidden_length(dims, shape) for dims, shape in tensors if (ELLIPSIS,) in dims
        ]
        self.hidden = tuple(f"d{index}" for index in range(max(lengths, default=0)))
        clash = {f for dims, _ in tensors for dim in dims for f in dim} & set(self.hidden)
        if clash:
            raise self.unfit(f"leaves the name {min(clash)!r} to the dims of '...'")
        groups: list[tuple[Dim, int]] = []
        for dims, shape in tensors:
            for dim, size, broadcast in self.matched(dims, shape):
                if len(dim) > 1:
                    groups.append((dim, size))
                elif broadcast and size == 1:
                    self.sizes.setdefault(dim[0], 1)
                elif broadcast and self.sizes.get(dim[0]) == 1:
                    self.sizes[dim[0]] = size
                else:
                    self.fix(dim[0], size)
        self.solve(groups)

    def hidden_length(self, dims: tuple[Dim, ...], shape: Shape) -> int:
        length = len(shape) - len(dims) + 1
        if length < 0:
            raise self.unfit("names at most the dims that a tensor has")
        return length

    def matched(self, dims: tuple[Dim, ...], shape: Shape) -> list[tuple[Dim, int, bool]]:
        """Return each dim of a tensor with its size, and whether it may be broadcast."""
        matches: list[tuple[Dim, int, bool]] = []
        if (ELLIPSIS,) not in dims and len(dims) != len(shape):
            raise self.unfit("names every dim of a tensor")
        at = 0
        for dim in dims:
            if dim == (ELLIPSIS,):
                length = self.hidden_length(dims, shape)
                names = self.hidden[len(self.hidden) - length :]
                matches += [((name,), shape[at + i], True) for i, name in enumerate(names)]
                at += length
            else:
                matches.append((dim, shape[at], False))
                at += 1
        return matches

    def fix(self, factor: str, size: int) -> None:
        if self.sizes.setdefault(factor, size) != size:
            raise self.unfit(f"gives {factor!r} one size, not {self.sizes[factor]} and {size}")

    def solve(self, groups: list[tuple[Dim, int]]) -> None:
        """Find the sizes of the factors of groups, at most one of which may be missing in each."""
        while groups:
            unsolved = []
            for dim, size in groups:
                missing = [factor for factor in dim if factor not in self.sizes]
                if len(missing) > 1:
                    unsolved.append((dim, size))
                    continue
                known = math.prod(self.sizes[f] for f in dim if f in self.sizes)
                if missing and known and size % known == 0:
                    self.sizes[missing[0]] = size // known
                elif missing or known != size:
                    raise self.unfit(f"gives ({' '.join(dim)}) a product of {size}")
            if len(unsolved) == len(groups):
                names = " ".join(unsolved[0][0])
                raise self.unfit(f"lets the sizes of ({names}) be found: pass sizes={{...}}")
            groups = unsolved

    def dims(self, dims: tuple[Dim, ...], shape: Shape | None) -> tuple[Dim, ...]:
        """Return the factors of a tensor's dims, without those of size 1."""
        if shape is not None:
            matched = self.matched(dims, shape)
            return tuple(
                () if broadcast and size == 1 else self.large(dim)
                for dim, size, broadcast in matched
            )
        factors: list[Dim] = []
        for dim in dims:
            if dim == (ELLIPSIS,):
                factors += [self.large((name,)) for name in self.hidden]
                continue
            unknown = [factor for factor in dim if factor not in self.sizes]
            if unknown:
                raise self.unfit(f"gives {unknown[0]!r} a size: pass sizes={{...}}")
            factors.append(self.large(dim))
        return tuple(factors)

    def large(self, dim: Dim) -> Dim:
        return tuple(factor for factor in dim if self.sizes[factor] != 1)

    def names(self, marked: frozenset[str]) -> frozenset[str]:
        """Return the marked factors, `...` spelled out."""
        return marked - {ELLIPSIS} | (set(self.hidden) if ELLIPSIS in marked else set())

    def unfit(self, requirement: str) -> InvalidInput:
        shapes = f"inputs {[tuple(shape) for shape in self.input_shapes]}"
        if self.output_shapes is not None:
            shapes += f", outputs {[tuple(shape) for shape in self.output_shapes]}"
        return InvalidInput(
            f"the line of a rule {requirement}",
            got=f"{self.pattern.text!r} for {shapes}",
            remedy="correct the line, or register a function that makes the rule of a call",
            source=self.source,
        )


def _read_tensor(part: str, text: str, whole: set[str], sums: set[str]) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    group: list[str] | None = None
    marked: list[str] = []  # the factors that a following mark belongs to
    at = 0
    part = part.strip()
    while at < len(part):
        match = _TOKEN.match(part, at)
        if match is None:
            raise _malformed(text, f"{part[at:].strip()[0]!r} is not part of the language")
        token, at = match[1], match.end()
        if token in "!+":
            if not marked:
                raise _malformed(text, f"{token!r} follows a factor, a group or '...'")
            (whole if token == "!" else sums).update(marked)
        elif token == "(":
            if group is not None:
                raise _malformed(text, "groups do not nest")
            group = []
        elif token == ")":
            if not group:
                raise _malformed(text, "a group holds at least one factor between ( and )")
            dims.append(tuple(group))
            marked, group = group, None
        elif group is not None:
            if token == ELLIPSIS:
                raise _malformed(text, "'...' stands outside groups")
            group.append(token)
            marked = [token]
        else:
            dims.append((token,))
            marked = [token]
    if group is not None:
        raise _malformed(text, "every ( has its )")
    names = [name for dim in dims for name in dim]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _malformed(text, f"a tensor has each factor once, not {twice[0]!r} twice")
    return tuple(dims)


def _extras(options: Options) -> list[ExtraTensor]:
    """Return the further tensors that autograd keeps, without sizes."""
    extra = options.get("extra", "")
    return [_read_extra(part, extra) for part in extra.split(",")] if extra else []


def _read_extra(part: str, text: str) -> ExtraTensor:
    """Read a tensor of factors; a dtype and a colon precede it if it is not of the output's."""
    dtype, colon, dims = part.rpartition(":")
    if colon and not isinstance(getattr(torch, dtype.strip(), None), torch.dtype):
        raise _malformed(text, f"{dtype.strip()!r} is no dtype of torch")
    kind = getattr(torch, dtype.strip()) if colon else None
    return ExtraTensor(_read_tensor(dims, text, set(), set()), kind)


def _is_product(inputs: Sequence[Sequence[Dim]], outputs: Sequence[Sequence[Dim]]) -> bool:
    """Return whether two inputs share a factor that no output has."""
    output_factors = {factor for dims in outputs for dim in dims for factor in dim}
    contracted = [
        factor for dims in inputs for dim in dims for factor in dim if factor not in output_factors
    ]
    return len(contracted) > len(set(contracted))


def _read_passes(passes: Passes, count: int, present: Sequence[int]) -> tuple[frozenset[int], ...]:
    if passes == "all":
        return (frozenset(range(count)),) if count else ()
    if passes == "each":
        return tuple(frozenset((index,)) for index in range(count))
    if isinstance(passes, str):
        if not passes:
            return ()
        raise InvalidInput(
            "passes are 'all', 'each' or sets of inputs",
            got=repr(passes),
            remedy="passes='each' for an operator that is linear in each input",
        )
    positions = {slot: index for index, slot in enumerate(present)}
    sets = (
        frozenset(positions[slot] for slot in members if slot in positions) for members in passes
    )
    return tuple(members for members in sets if members)


def _malformed(text: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"a rule is one line 'inputs -> outputs': {reason}",
        got=repr(text),
        remedy="write it like '... i, o i -> ... o'",
    )


def line_of(
    inputs: Sequence[Sequence[Dim]], outputs: Sequence[Sequence[Dim]], whole: frozenset[str]
) -> str:
    """Return the line of a rule that was derived from shapes."""

    def tensor(dims: Sequence[Dim]) -> str:
        return " ".join(
            "1" if not dim else marked(dim)[0] if len(dim) == 1 else f"({' '.join(marked(dim))})"
            for dim in dims
        )

    def marked(dim: Dim) -> list[str]:
        return [name + "!" * (name in whole) for name in dim]

    return f"{', '.join(map(tensor, inputs))} -> {', '.join(map(tensor, outputs))}".strip()
