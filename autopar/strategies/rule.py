"""Rule and Strategy: what an operator can do, and what it was told to do.

A rule names, for each dim of each tensor, the factor that runs over it. A strategy gives mesh axes
to factors. Everything else follows: the layouts of inputs and outputs, and of all gradients.

>>> rule = parse("m k, k n -> m n", ((8, 4), (4, 6)))
>>> signature = rule.signature(Strategy.of(m="dp", k="tp"))
>>> signature.outputs[0]
[@dp, _]{+tp}

On one axis that a strategy gives to factor f:

- an input or output that has f is cut on that dim, and so is its gradient;
- an input that lacks f is a replica, and its gradient is a partial sum;
- an output that lacks f is a partial sum, and its gradient a replica.

On one axis that it gives to a pass (a set of inputs): those inputs and the output are partial
sums with replicated gradients, the other inputs are replicas whose gradients are partial sums.
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
    signatures,
)
from autopar.strategies.strategy import JointCut, PartsCut, Strategy
from autopar.text.units import counted

Quantifier = Callable[[Iterable[bool]], bool]


class ExtraTensor(NamedTuple):
    """A tensor that autograd keeps besides inputs and outputs, by its factors."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype | None = None  # None: that of the output


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of one call until its backward has run."""

    inputs: tuple[int, ...] = ()
    output: bool = False
    extra: tuple[ExtraTensor, ...] = ()
    factors: frozenset[int] = frozenset()  # inputs kept for the gradients of other inputs alone

    def inputs_for(self, learns: Sequence[bool]) -> tuple[int, ...]:
        """Which inputs are kept, where each input `learns` or not."""

        def serves(index: int, other: int) -> bool:
            return learns[other] and (other != index or index not in self.factors)

        count = len(learns)
        return tuple(
            i for i in self.inputs if i < count and any(serves(i, j) for j in range(count))
        )


@dataclass(frozen=True)
class Rule:
    """What one call of an operator can do, with the sizes of that call."""

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
    # Of factors that are runs of one line, as those of what is joined and of the whole, the start.
    spans: Mapping[str, int] = field(default_factory=dict)
    flops: float = 0.0  # of the uncut forward
    backward_flops: float | None = None  # of all gradients; None: as follows from `flops`
    triangle: str | None = None  # a factor of which the last piece has up to twice its share
    between: IntermediateWork = NO_WORK  # of the uncut call
    product: bool = False  # inputs are multiplied and summed: its FLOPs count, whatever the sizes
    text: str = ""
    sums: frozenset[str] = frozenset()  # contracted although some input lacks them
    gathered: frozenset[str] = frozenset()  # contracted, but their kernel leaves a whole output
    saved: Saved = Saved()
    kept: Mapping[str, Saved] = field(default_factory=dict)  # by joint, where its kernel keeps else
    adds: frozenset[str] = frozenset()  # arguments that are numbers, added to what is else linear
    rounds: bool = False  # linear but for digits: a sum over micro-batches passes, none over ranks

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Every factor of size above 1, in the order of first use."""
        dims = itertools.chain.from_iterable(self.inputs + self.outputs)
        return tuple(dict.fromkeys(factor for dim in dims for factor in dim))

    @cached_property
    def cuttable(self) -> tuple[str, ...]:
        """The factors that an axis may cut."""
        return tuple(factor for factor in self.factors if self.why_whole(factor) is None)

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """What axes may be given to: factors, joints, and parts."""
        joints = (name for name in self.joints if self.why_whole(name) is None)
        return (*self.cuttable, *joints, *self.parts)

    @cached_property
    def is_contraction(self) -> bool:
        """Whether each gradient is a product of its own, as that of a linear operator."""
        given = [dim for dims in self.outputs for dim in dims]
        lost = any(not any(factor in dim for dim in given) for factor in self.factors)
        return lost and len(self.inputs) > 1 and self.backward_flops is None

    @property
    def is_heavy(self) -> bool:
        """Whether it takes far more work than reading its inputs: sums that pass through it would
        let all ranks do all of that."""
        return self.flops > 4 * self.elements_read

    @property
    def is_cheap(self) -> bool:
        """Whether it takes little more than reading its inputs."""
        return self.flops <= 16 * self.elements_read and not self.product

    @cached_property
    def elements_read(self) -> int:
        """Of all inputs, uncut."""
        return sum(math.prod(self.sizes[f] for dim in dims for f in dim) for dims in self.inputs)

    def why_whole(self, factor: str) -> str | None:
        """Why no axis may cut `factor`, or what a joint of that name cuts; None if one may."""
        if (joint := self.joints.get(factor)) is not None:
            return next(filter(None, map(self._why_not_at_once, joint.factors)), None)
        if factor in self.parts:
            return None
        if factor not in self.factors:
            return f"{factor!r} is not one of the rule's factors of size above 1"
        if factor in self.whole:
            return f"the operator needs {factor!r} whole on every rank"
        if (reason := self._why_not_at_once(factor)) is not None:
            return reason
        if not _has(self.outputs, factor, all) and factor not in self.sums | self.gathered:
            if _has(self.outputs, factor, any):
                return f"an output lacks {factor!r} and another one has it"
            if not _has(self.inputs, factor, all):
                return f"{factor!r} is contracted, and an input lacks it"
        return None

    def _why_not_at_once(self, factor: str) -> str | None:
        """What keeps any axis from `factor`, and a joint from it, too."""
        if factor not in self.factors:
            return f"{factor!r} is not one of the rule's factors of size above 1"
        if any(factor in dim[1:] for dims in self.inputs + self.outputs for dim in dims):
            return f"only the outermost factor of a dim can be cut, and {factor!r} is an inner one"
        return None

    def saved_under(self, strategy: Strategy) -> Saved:
        """What is kept of a call, by its kernel where it needs one."""
        return next((self.kept[name] for name, _ in strategy.cuts if name in self.kept), self.saved)

    def signature(self, strategy: Strategy) -> LayoutSignature:
        """The layouts of inputs, of their gradients and of outputs under `strategy`."""
        return self.signatures.of(strategy)

    @cached_property
    def signatures(self) -> LayoutSignatures:
        """Shared by all calls that are alike but for sizes."""
        at_once = tuple(self.joints.items()), tuple(self.parts.items())
        return signatures(self.inputs, self.outputs, self.passes, self.gathered, *at_once)

    def strategies(self, mesh: Mesh, *, ordered: bool = True) -> list[Strategy]:
        """All candidates: each axis to a factor, to a pass, or to nothing.

        Several axes on one factor come in every order, or only in the mesh's if not `ordered`.
        """
        axes = tuple(axis for axis in mesh if mesh[axis] > 1)
        degrees = [mesh.degree(some) for some in _subsets(axes)]
        fitting = tuple(
            (choice, tuple(self.fits(choice, degree) for degree in degrees))
            for choice in self.choices
        )
        found = _assigned(axes, fitting, len(self.passes), ordered, frozenset(self.joints))
        if not (self.joints or self.parts):
            return [*found]
        return [way for way in found if self.go_together(way.by_factor, mesh)]

    def go_together(self, cuts: Mapping[str, Sequence[str]], mesh: Mesh) -> bool:
        """Whether there is one joint at most, and what it cuts besides others is large enough; a
        dim is cut in parts or as a whole."""
        joints = [name for name in cuts if name in self.joints]
        for name in cuts.keys() & self.parts.keys():
            beside = {factor for other in cuts if other != name for factor in self._cut_by(other)}
            if not self._in_dims_of(self.parts[name].factors).isdisjoint(beside):
                return False
        return len(joints) < 2 and all(
            self.fits(factor, mesh.degree([*cuts[name], *cuts.get(factor, ())]))
            for name in joints
            for factor in self.joints[name].factors
        )

    def _in_dims_of(self, factors: Collection[str]) -> set[str]:
        """The factors of all dims that have one of `factors`."""
        dims = itertools.chain.from_iterable(self.inputs + self.outputs)
        return {other for dim in dims if not set(dim).isdisjoint(factors) for other in dim}

    def _cut_by(self, choice: str) -> Iterable[str]:
        group = self.joints.get(choice) or self.parts.get(choice)
        return (choice,) if group is None else group.factors

    def fits(self, factor: str, degree: int) -> bool:
        """Whether `factor` is large enough for so many pieces, and even where it must be."""
        if (joint := self.joints.get(factor)) is not None:
            return all(self.fits(one, degree) for one in joint.factors)
        if (parts := self.parts.get(factor)) is not None:
            return all(self.sizes[one] % (degree * own) == 0 for one, own in parts.sizes)
        size = self.sizes[factor]
        return size % degree == 0 if self.must_be_even(factor) else degree <= size

    def cuts_of(self, strategy: Strategy) -> dict[str, Axes]:
        """The axes that cut each factor, as a whole or in parts."""
        cuts = strategy.by_factor
        for name in self.parts.keys() & cuts.keys():
            axes = cuts.pop(name)
            cuts |= dict.fromkeys(self.parts[name].factors, axes)
        return cuts

    def must_be_even(self, factor: str) -> bool:
        """Whether `factor` may be cut only into equal pieces."""
        dims = [dim for tensor in self.inputs + self.outputs for dim in tensor]
        shared = any(factor in dim and len(dim) > 1 for dim in dims)
        return factor in self.even or factor in self.parts or shared

    def validate(self, strategy: Strategy, mesh: Mesh, source: str | None = None) -> None:
        """Refuse a strategy that this rule does not allow on `mesh`."""

        def refusal(rule: str, remedy: str, got: str = "") -> InvalidInput:
            given = f"{strategy} for {self.text!r} with {dict(self.sizes)} on {mesh}"
            return InvalidInput(rule, got=got + given, remedy=remedy, source=source)

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
                sizes = ", ".join(f"{one!r} of size {self.sizes[one]}" for one in cut)
                raise refusal(
                    rule, "use fewer axes on it", f"{counted(degree, 'piece')} of {sizes}; "
                )
        if not self.go_together(strategy.by_factor, mesh):
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
        """Start and length of the piece of `factor` that `rank` works on."""
        return self._bounds(factor, strategy.by_factor.get(factor, ()), mesh, rank)

    def _bounds(self, factor: str, axes: Axes, mesh: Mesh, rank: int) -> tuple[int, int]:
        place = mesh.coordinate(rank)
        start, length = 0, self.sizes[factor]
        for axis in axes:
            offset, length = chunk(length, mesh[axis], place[axis])
            start += offset
        return start, length

    def pieces(
        self, name: str, strategy: Strategy, mesh: Mesh, members: Sequence[int]
    ) -> dict[str, tuple[tuple[int, int], ...]]:
        """Start and length of the pieces of some ranks, of what their axes cut: a factor, or those
        of a joint of that name."""
        cuts, joint = strategy.by_factor, self.joints.get(name)
        # Of what is cut in parts, a rank has no one piece; no kernel asks for it.
        alone = () if name in self.parts else (name,)
        factors = alone if joint is None else joint.factors
        beside = () if joint is None else cuts[name]
        return {
            factor: tuple(
                self._bounds(factor, (*cuts.get(factor, ()), *beside), mesh, rank)
                for rank in members
            )
            for factor in factors
        }

    def kernel(self, strategy: Strategy) -> tuple[str, str] | None:
        """The factor (or joint) and the name of the kernel that `strategy` needs, if it needs one;
        that of a joint knows of all that is cut."""
        found = {name: self.joints[name].kernel for name, _ in strategy.cuts if name in self.joints}
        found |= {name: self.kernels[name] for name, _ in strategy.cuts if name in self.kernels}
        return next(iter(found.items()), None)

    def joint_of(self, cut: set[str]) -> str | None:
        """What one axis that cuts all these is given to: the only factor, or what cuts it alone, or
        a joint of them; None if there is none."""
        if len(cut) == 1:
            return self.alone(next(iter(cut)))
        found = (name for name, joint in self.joints.items() if cut <= {*joint.factors})
        return next(found, None)

    def joint_that_follows(self, before: str, factor: str) -> str | None:
        """What propagation gives an axis to that cuts one factor, and comes to cut another."""
        joint = self.joints.get(name := self.joint_of({before, factor}) or "")
        return name if joint is not None and joint.follows else None

    def alone(self, factor: str) -> str:
        """A factor, or the joint that cuts nothing else of the inputs, or of the outputs, where the
        factor by itself stays whole."""
        if self.why_whole(factor) is None:
            return factor
        for name, joint in self.joints.items():
            if {factor} in ({*joint.inputs} - {None}, {*joint.outputs} - {None}):
                return name
        return factor

    def factors_of(self, choice: str) -> tuple[Sequence[str | None], Sequence[str | None]]:
        """What an axis cuts of each input, and of each output, that is given to a factor, a joint
        or parts of that name."""
        if (joint := self.joints.get(choice)) is not None:
            return joint.inputs, joint.outputs
        if (parts := self.parts.get(choice)) is not None:
            return [t and t[0] for t in parts.inputs], [t and t[0] for t in parts.outputs]
        return [choice] * len(self.inputs), [choice] * len(self.outputs)


@dataclass(frozen=True, eq=False)
class Facts:
    """One call of an operator, as far as its cost goes. Calls that are alike share this object."""

    rule: Rule
    itemsizes: tuple[int, ...]  # of the tensor inputs
    differentiable: tuple[bool, ...]  # which inputs get a gradient
    dtypes: tuple[torch.dtype, ...]  # of the outputs
    is_view: bool  # gives a view of its input: nothing is computed
    on_host: bool = False  # its result is there
    crosses: bool = False  # between host and device
    is_random: bool = False  # gives other numbers every time

    @property
    def dtype(self) -> torch.dtype:
        """That of the first output, in which the operator computes."""
        return self.dtypes[0]

    @property
    def is_cheap(self) -> bool:
        """Whether it takes little more than reading its inputs, and gives the same every time."""
        return self.rule.is_cheap and not self.is_random


def names(count: int, prefix: str = "d") -> list[Dim]:
    """A factor for each of `count` dims."""
    return [(f"{prefix}{index}",) for index in range(count)]


def broadcast(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """The dims of a tensor of `shape` that is broadcast to one with `dims`."""
    aligned = dims[len(dims) - len(shape) :]
    return [() if size == 1 else dim for dim, size in zip(aligned, shape)]


def product(sizes: Mapping[str, int]) -> int:
    """The number of points of all factors together."""
    return math.prod(sizes.values())


def _has(tensors: Sequence[Sequence[Dim]], factor: str, quantifier: Quantifier) -> bool:
    return quantifier(any(factor in dim for dim in dims) for dims in tensors)


@lru_cache
def _subsets(axes: Axes) -> tuple[Axes, ...]:
    """All choices of some of the axes, in their order."""
    sizes = range(len(axes) + 1)
    return tuple(itertools.chain(*(itertools.combinations(axes, size) for size in sizes)))


@lru_cache(maxsize=1 << 12)
def _assigned(
    axes: Axes,
    fitting: tuple[tuple[str, tuple[bool, ...]], ...],
    passes: int,
    ordered: bool,
    in_order: frozenset[str],
) -> tuple[Strategy, ...]:
    """Each axis to a choice, to one of so many passes, or to nothing. `fitting`: the choices, and
    which subsets of the axes each may have; `in_order`: those that have theirs as they stand."""
    fits = {name: dict(zip(_subsets(axes), fit)) for name, fit in fitting}
    found = []
    for assignment in itertools.product([None, *fits, *range(passes)], repeat=len(axes)):
        cuts: dict[str, Axes] = {}
        passed: list[tuple[str, int]] = []
        for axis, choice in zip(axes, assignment):
            if isinstance(choice, str):
                cuts[choice] = (*cuts.get(choice, ()), axis)
            elif choice is not None:
                passed.append((axis, choice))
        if not all(fits[name][own] for name, own in cuts.items()):
            continue
        names = sorted(cuts)
        orders = [
            itertools.permutations(cuts[name]) if ordered and name not in in_order else [cuts[name]]
            for name in names
        ]
        for order in itertools.product(*orders):
            found.append(Strategy(tuple(zip(names, order)), tuple(sorted(passed))))
    return tuple(found)
