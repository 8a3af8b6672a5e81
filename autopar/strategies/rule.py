"""Rules: how a call of an operator can be cut.

A rule names, for each dim of each tensor, the factor that runs over it. A strategy gives mesh axes
to factors. Everything else follows: the layouts of inputs and outputs, and of all gradients.

>>> rule = parse("m k, k n -> m n", ((8, 4), (4, 6)))
>>> rule.signature(Strategy.of(m="dp", k="tp")).outputs[0]
[@dp, _]{+tp}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from autopar.errors import InvalidInput
from autopar.layout import chunk
from autopar.mesh import Mesh
from autopar.strategies.intermediate_work import NO_WORK, IntermediateWork
from autopar.strategies.layout_signature import (
    Axes,
    Dim,
    LayoutSignature,
    LayoutSignatures,
    layout_signatures,
)
from autopar.strategies.strategy import JointCut, PartsCut, Strategy
from autopar.text.units import counted


class ExtraTensor(NamedTuple):
    """A tensor that autograd keeps besides inputs and outputs, by its factors."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype | None = None  # None: the output's


@dataclass(frozen=True)
class Saved:
    """The tensors that autograd keeps of one call until its backward has run."""

    inputs: tuple[int, ...] = ()
    output: bool = False
    extra: tuple[ExtraTensor, ...] = ()
    factors: frozenset[int] = frozenset()  # inputs kept for the gradients of other inputs alone

    def inputs_for(self, learns: Sequence[bool]) -> tuple[int, ...]:
        """Return the inputs that are kept; `learns` says which inputs take a gradient."""

        def serves(index: int, other: int) -> bool:
            return learns[other] and (other != index or index not in self.factors)

        count = len(learns)
        return tuple(
            i for i in self.inputs if i < count and any(serves(i, j) for j in range(count))
        )


@dataclass(frozen=True)
class Rule:
    """The ways to cut one call of an operator, with the sizes of that call.

    On one axis that a strategy gives to factor f:

    - an input or output that has f is cut on that dim, and so is its gradient;
    - an input that lacks f is a replica, and its gradient is a partial sum;
    - an output that lacks f is a partial sum, and its gradient a replica.

    On one axis that it gives to a pass (a set of inputs) these inputs and the output are partial
    sums with replicated gradients; the other inputs are as those that lack f.
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()  # factors that no axis may cut
    even: frozenset[str] = frozenset()  # factors that may be cut only into equal pieces
    passes: tuple[frozenset[int], ...] = ()  # inputs that may be partial sums together
    kernels: Mapping[str, str] = field(default_factory=dict)  # factor -> kernel needed to cut it
    joints: Mapping[str, JointCut] = field(
        default_factory=dict
    )  # by name, which stands for a factor
    parts: Mapping[str, PartsCut] = field(default_factory=dict)  # by name, as joints
    # The start of factors that are runs of one line, as of the pieces that `cat` joins.
    spans: Mapping[str, int] = field(default_factory=dict)
    flops: float = 0.0  # of the uncut forward
    backward_flops: float | None = None  # of all gradients; None: as follows from `flops`
    triangle: str | None = None  # a factor of which the last piece has up to twice its share
    intermediate: IntermediateWork = NO_WORK  # of the uncut call
    product: bool = False  # inputs are multiplied and summed: its FLOPs count, whatever the sizes
    text: str = ""
    sums: frozenset[str] = frozenset()  # contracted although some input lacks them
    gathered: frozenset[str] = frozenset()  # contracted, but their kernel leaves a whole output
    saved: Saved = Saved()
    saved_by_joint: Mapping[str, Saved] = field(default_factory=dict)  # where its kernel differs
    added_numbers: frozenset[str] = frozenset()  # arguments added to what is else linear
    rounds: bool = False  # linear but for rounding: sums over micro-batches pass, not over ranks

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Return every factor of size above 1, in the order of first use."""
        dims = itertools.chain.from_iterable(self.inputs + self.outputs)
        return tuple(dict.fromkeys(factor for dim in dims for factor in dim))

    @cached_property
    def cuttable(self) -> tuple[str, ...]:
        """Return the factors that an axis may cut."""
        return tuple(factor for factor in self.factors if self.why_whole(factor) is None)

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """Return the names that axes may be given to: of factors, joints, and parts."""
        joints = (name for name in self.joints if self.why_whole(name) is None)
        return (*self.cuttable, *joints, *self.parts)

    @cached_property
    def is_contraction(self) -> bool:
        """Return whether each gradient is a separate product, as for a linear operator."""
        output_dims = [dim for dims in self.outputs for dim in dims]
        lost = any(not any(factor in dim for dim in output_dims) for factor in self.factors)
        return lost and len(self.inputs) > 1 and self.backward_flops is None

    @property
    def is_heavy(self) -> bool:
        """Return whether it takes far more work than reading its inputs, which ranks must share."""
        return self.flops > 4 * self.elements_read

    @property
    def is_cheap(self) -> bool:
        """Return whether it takes little more than reading its inputs."""
        return self.flops <= 16 * self.elements_read and not self.product

    @cached_property
    def elements_read(self) -> int:
        """Return the number of elements of all inputs, uncut."""
        return sum(math.prod(self.sizes[f] for dim in dims for f in dim) for dims in self.inputs)

    def why_whole(self, factor: str) -> str | None:
        """Return why no axis may cut `factor`, a factor's or joint's name; None if one may."""
        if (joint := self.joints.get(factor)) is not None:
            return next(filter(None, map(self._why_uncuttable, joint.factors)), None)
        if factor in self.parts:
            return None
        if factor not in self.factors:
            return f"{factor!r} is not one of the rule's factors of size above 1"
        if factor in self.whole:
            return f"the operator needs {factor!r} whole on every rank"
        if (reason := self._why_uncuttable(factor)) is not None:
            return reason
        if not _has(self.outputs, factor, all) and factor not in self.sums | self.gathered:
            if _has(self.outputs, factor, any):
                return f"an output lacks {factor!r} and another one has it"
            if not _has(self.inputs, factor, all):
                return f"{factor!r} is contracted, and an input lacks it"
        return None

    def _why_uncuttable(self, factor: str) -> str | None:
        """Return why neither an axis nor a joint may cut `factor`; None if both may."""
        if factor not in self.factors:
            return f"{factor!r} is not one of the rule's factors of size above 1"
        if any(factor in dim[1:] for dims in self.inputs + self.outputs for dim in dims):
            return f"only the outermost factor of a dim can be cut, and {factor!r} is an inner one"
        return None

    def saved_under(self, strategy: Strategy) -> Saved:
        """Return the tensors kept under `strategy`, whose joint kernel may keep others."""
        return next(
            (self.saved_by_joint[n] for n, _ in strategy.cuts if n in self.saved_by_joint),
            self.saved,
        )

    def signature(self, strategy: Strategy) -> LayoutSignature:
        """Return the layouts of inputs, of their gradients and of outputs under `strategy`."""
        return self.signatures.of(strategy)

    @cached_property
    def signatures(self) -> LayoutSignatures:
        """Return the signatures by strategy, shared by all calls that differ in sizes alone."""
        return layout_signatures(
            inputs=self.inputs,
            outputs=self.outputs,
            passes=self.passes,
            gathered=self.gathered,
            joints=tuple(self.joints.items()),
            parts=tuple(self.parts.items()),
        )

    def strategies(self, mesh: Mesh, *, ordered: bool = True) -> list[Strategy]:
        """Return all candidates: each axis to a factor, to a pass, or to nothing.

        Several axes on one factor come in every order, or only in the mesh's if not `ordered`.
        """
        axes = tuple(axis for axis in mesh if mesh[axis] > 1)
        degrees = [mesh.degree(subset) for subset in _subsets(axes)]
        fitting = tuple(
            (choice, tuple(self.fits(choice, degree) for degree in degrees))
            for choice in self.choices
        )
        candidates = _assigned(
            axes,
            fitting,
            passes=len(self.passes),
            ordered=ordered,
            in_order=frozenset(self.joints),
        )
        if not (self.joints or self.parts):
            return [*candidates]
        return [s for s in candidates if self.can_combine(s.by_factor, mesh)]

    def can_combine(self, cuts: Mapping[str, Sequence[str]], mesh: Mesh) -> bool:
        """Return whether these cuts may stand in one strategy: with one joint at most, say."""
        joints = [name for name in cuts if name in self.joints]
        for name in cuts.keys() & self.parts.keys():
            others = {factor for other in cuts if other != name for factor in self._cut_by(other)}
            if not self._in_dims_of(self.parts[name].factors).isdisjoint(others):
                return False
        return len(joints) < 2 and all(
            self.fits(factor, mesh.degree([*cuts[name], *cuts.get(factor, ())]))
            for name in joints
            for factor in self.joints[name].factors
        )

    def _in_dims_of(self, factors: Collection[str]) -> set[str]:
        """Return the factors of all dims that have one of `factors`."""
        dims = itertools.chain.from_iterable(self.inputs + self.outputs)
        return {other for dim in dims if not set(dim).isdisjoint(factors) for other in dim}

    def _cut_by(self, choice: str) -> Iterable[str]:
        group = self.joints.get(choice) or self.parts.get(choice)
        return (choice,) if group is None else group.factors

    def fits(self, factor: str, degree: int) -> bool:
        """Return whether `factor` can be cut into `degree` pieces, evenly where it must be."""
        if (joint := self.joints.get(factor)) is not None:
            return all(self.fits(f, degree) for f in joint.factors)
        if (parts := self.parts.get(factor)) is not None:
            return all(self.sizes[f] % (degree * number) == 0 for f, number in parts.sizes)
        size = self.sizes[factor]
        return size % degree == 0 if self.must_be_even(factor) else degree <= size

    def cuts_of(self, strategy: Strategy) -> dict[str, Axes]:
        """Return the axes that cut each factor, as a whole or in parts."""
        cuts = strategy.by_factor
        for name in self.parts.keys() & cuts.keys():
            axes = cuts.pop(name)
            cuts |= dict.fromkeys(self.parts[name].factors, axes)
        return cuts

    def must_be_even(self, factor: str) -> bool:
        """Return whether `factor` may be cut only into equal pieces."""
        dims = [dim for tensor in self.inputs + self.outputs for dim in tensor]
        shared = any(factor in dim and len(dim) > 1 for dim in dims)
        return factor in self.even or factor in self.parts or shared

    def validate(self, strategy: Strategy, mesh: Mesh, source: str | None = None) -> None:
        """Refuse a strategy that this rule does not allow on `mesh`."""

        def refusal(rule: str, remedy: str, got: str = "") -> InvalidInput:
            details = f"{strategy} for {self.text!r} with {dict(self.sizes)} on {mesh}"
            return InvalidInput(rule, got=got + details, remedy=remedy, source=source)

        for axis in strategy.axes:
            mesh[axis]
        if len(set(strategy.axes)) != len(strategy.axes):
            rule = "a strategy gives each axis to one factor or pass"
            raise refusal(rule, "name each axis once")
        for factor, axes in strategy.cuts:
            if (reason := self.why_whole(factor)) is not None:
                remedy = f"cut one of {', '.join(self.choices) or 'none: all are whole'}"
                raise refusal(f"this factor cannot be cut: {reason}", remedy)
            degree = mesh.degree(axes)
            if not self.fits(factor, degree):
                wanted = "divide" if self.must_be_even(factor) else "be at most"
                rule = f"the number of pieces must {wanted} the size of the factor"
                cut = self._cut_by(factor)
                sizes = ", ".join(f"{f!r} of size {self.sizes[f]}" for f in cut)
                raise refusal(
                    rule, "use fewer axes on it", f"{counted(degree, 'piece')} of {sizes}; "
                )
        if not self.can_combine(strategy.by_factor, mesh):
            rule = "a strategy has one joint, whose factors are large enough for all their axes"
            raise refusal(rule, "use fewer axes")
        for name in self.joints.keys() & strategy.by_factor.keys():
            if sorted(axes := strategy.by_factor[name], key=mesh.names.index) != [*axes]:
                rule = "the axes of a joint stand in the order of the mesh, as its ranks do"
                raise refusal(rule, "name them in that order")
        for axis, index in strategy.passes:
            if not 0 <= index < len(self.passes):
                rule = "a partial sum goes only through one of the rule's passes"
                got = f"pass {index} over {axis!r}; the rule has {len(self.passes)}; "
                raise refusal(rule, "reduce the partial sum first", got)

    def bounds(self, factor: str, strategy: Strategy, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Return start and length of the piece of `factor` that `rank` works on."""
        return self._bounds(factor, strategy.by_factor.get(factor, ()), mesh, rank)

    def _bounds(self, factor: str, axes: Axes, mesh: Mesh, rank: int) -> tuple[int, int]:
        coordinate = mesh.coordinate(rank)
        start, length = 0, self.sizes[factor]
        for axis in axes:
            offset, length = chunk(length, mesh[axis], coordinate[axis])
            start += offset
        return start, length

    def pieces(
        self, name: str, strategy: Strategy, mesh: Mesh, members: Sequence[int]
    ) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return start and length of the members' pieces of a factor, or of a joint's factors."""
        cuts, joint = strategy.by_factor, self.joints.get(name)
        single = () if name in self.parts else (name,)
        factors = single if joint is None else joint.factors
        joint_axes = () if joint is None else cuts[name]
        return {
            factor: tuple(
                self._bounds(factor, (*cuts.get(factor, ()), *joint_axes), mesh, rank)
                for rank in members
            )
            for factor in factors
        }

    def kernel(self, strategy: Strategy) -> tuple[str, str] | None:
        """Return the joint or else factor that needs a kernel, and the kernel's name; or None."""
        kernels = {
            name: self.joints[name].kernel for name, _ in strategy.cuts if name in self.joints
        }
        kernels |= {name: self.kernels[name] for name, _ in strategy.cuts if name in self.kernels}
        return next(iter(kernels.items()), None)

    def joint_of(self, cut: set[str]) -> str | None:
        """Return the factor or joint by which one axis cuts all factors of `cut`; None if none."""
        if len(cut) == 1:
            return self.cut_alone(next(iter(cut)))
        joints = (name for name, joint in self.joints.items() if cut <= {*joint.factors})
        return next(joints, None)

    def joint_after(self, before: str, factor: str) -> str | None:
        """Return the joint by which an axis that cuts `before` cuts `factor`, too; None if none."""
        joint = self.joints.get(name := self.joint_of({before, factor}) or "")
        return name if joint is not None and joint.follows else None

    def cut_alone(self, factor: str) -> str:
        """Return a factor that may be cut by itself, or the joint that cuts it alone."""
        if self.why_whole(factor) is None:
            return factor
        for name, joint in self.joints.items():
            if {factor} in ({*joint.inputs} - {None}, {*joint.outputs} - {None}):
                return name
        return factor

    def factors_of(self, choice: str) -> tuple[Sequence[str | None], Sequence[str | None]]:
        """Return the factor of each input, and of each output, that `choice` cuts; None: whole."""
        if (joint := self.joints.get(choice)) is not None:
            return joint.inputs, joint.outputs
        if (parts := self.parts.get(choice)) is not None:
            return [t and t[0] for t in parts.inputs], [t and t[0] for t in parts.outputs]
        return [choice] * len(self.inputs), [choice] * len(self.outputs)


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts of a call on which its cost depends; equal calls share the object."""

    rule: Rule
    itemsizes: tuple[int, ...]  # of the tensor inputs
    differentiable: tuple[bool, ...]  # which inputs get a gradient
    dtypes: tuple[torch.dtype, ...]  # of the outputs
    is_view: bool  # gives a view of its input: nothing is computed
    on_host: bool = False
    crosses: bool = False  # between host and device
    is_random: bool = False  # gives other numbers every time

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first output, in which the operator computes."""
        return self.dtypes[0]

    @property
    def is_cheap(self) -> bool:
        """Return whether it costs little more than reading its inputs, and is deterministic."""
        return self.rule.is_cheap and not self.is_random


def names(count: int, prefix: str = "d") -> list[Dim]:
    """Return a factor for each of `count` dims."""
    return [(f"{prefix}{index}",) for index in range(count)]


def broadcast(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """Return the dims of a tensor of `shape` that is broadcast to one with `dims`."""
    aligned = dims[len(dims) - len(shape) :]
    return [() if size == 1 else dim for dim, size in zip(aligned, shape)]


def product(sizes: Mapping[str, int]) -> int:
    """Return the number of points of all factors together."""
    return math.prod(sizes.values())


def _has(
    tensors: Sequence[Sequence[Dim]], factor: str, quantifier: Callable[[Iterable[bool]], bool]
) -> bool:
    return quantifier(any(factor in dim for dim in dims) for dims in tensors)


@lru_cache
def _subsets(axes: Axes) -> tuple[Axes, ...]:
    sizes = range(len(axes) + 1)
    return tuple(itertools.chain(*(itertools.combinations(axes, size) for size in sizes)))


@lru_cache(maxsize=1 << 12)
def _assigned(
    axes: Axes,
    fitting: tuple[tuple[str, tuple[bool, ...]], ...],
    *,
    passes: int,
    ordered: bool,
    in_order: frozenset[str],
) -> tuple[Strategy, ...]:
    """Return all strategies that give each axis to a choice, a pass, or nothing.

    `fitting`: each choice, and which subsets of axes fit; `in_order`: choices with axes in order.
    """
    fits = {name: dict(zip(_subsets(axes), fit)) for name, fit in fitting}
    strategies = []
    for assignment in itertools.product([None, *fits, *range(passes)], repeat=len(axes)):
        cuts: dict[str, Axes] = {}
        passed: list[tuple[str, int]] = []
        for axis, choice in zip(axes, assignment):
            if isinstance(choice, str):
                cuts[choice] = (*cuts.get(choice, ()), axis)
            elif choice is not None:
                passed.append((axis, choice))
        if not all(fits[name][subset] for name, subset in cuts.items()):
            continue
        names = sorted(cuts)
        orders = [
            itertools.permutations(cuts[name]) if ordered and name not in in_order else [cuts[name]]
            for name in names
        ]
        for order in itertools.product(*orders):
            strategies.append(Strategy(tuple(zip(names, order)), tuple(sorted(passed))))
    return tuple(strategies)
