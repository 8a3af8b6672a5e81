"""Layout signatures: the layouts that a strategy fixes; they follow from dims, whatever the sizes.

signatures = layout_signatures(inputs=rule.inputs, outputs=rule.outputs, ...)
signatures.of(Strategy.of(m="dp")).outputs[0]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from autopar.layout import Layout, Placement
from autopar.strategies.strategy import JointCut, PartsCut, Strategy

Axes = tuple[str, ...]
Dim = tuple[str, ...]  # the factors of one dim, outermost first; () for a dim of size 1


@dataclass(frozen=True)
class LayoutSignature:
    """The layouts that a strategy fixes.

    Over the axes `gradients[i].partial` the gradient of input i arrives as a partial sum.
    """

    inputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def wants(self, learns: Sequence[bool]) -> tuple[Placement, ...]:
        """Return the placement of each input; gradients are pending of inputs that learn."""
        return tuple(
            Placement(layout, gradient.partial if learned else ())
            for layout, gradient, learned in zip(self.inputs, self.gradients, learns)
        )


@lru_cache(maxsize=1 << 12)
def layout_signatures(
    *,
    inputs: tuple[tuple[Dim, ...], ...],
    outputs: tuple[tuple[Dim, ...], ...],
    passes: tuple[frozenset[int], ...],
    gathered: frozenset[str],
    joints: tuple[tuple[str, JointCut], ...],
    parts: tuple[tuple[str, PartsCut], ...],
) -> LayoutSignatures:
    """Return the signatures that all rules with these dims share; arguments are `Rule`'s fields."""
    return LayoutSignatures(inputs, outputs, passes, gathered, dict(joints), dict(parts))


@dataclass(frozen=True, eq=False)
class LayoutSignatures:
    """The signatures of rules with equal dims, by strategy, computed when first asked for."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    passes: tuple[frozenset[int], ...]
    gathered: frozenset[str]
    joints: Mapping[str, JointCut]
    parts: Mapping[str, PartsCut]
    _known: dict[Strategy, LayoutSignature] = field(default_factory=dict)

    def of(self, strategy: Strategy) -> LayoutSignature:
        """Return the layouts that `strategy` fixes."""
        if strategy not in self._known:
            self._known[strategy] = self._of(strategy)
        return self._known[strategy]

    def _of(self, strategy: Strategy) -> LayoutSignature:
        passed = {axis: self.passes[index] for axis, index in strategy.passes}
        inputs, gradients, outputs = [], [], []
        for index, dims in enumerate(self.inputs):
            cuts = self._cuts(strategy, lambda joint: joint.inputs[index])  # noqa: B023
            through = [axis for axis, members in passed.items() if index in members]
            bypassed = [axis for axis, members in passed.items() if index not in members]
            layout = _layout(dims, cuts, through)
            inputs.append(layout)
            gradients.append(layout.with_partial([*_lacking(dims, cuts), *bypassed]))
        for index, dims in enumerate(self.outputs):
            cuts = self._cuts(strategy, lambda joint: joint.outputs[index])  # noqa: B023
            whole = self.gathered | self.joints.keys()
            summed = {factor: axes for factor, axes in cuts.items() if factor not in whole}
            outputs.append(_layout(dims, cuts, [*_lacking(dims, summed), *passed]))
        return LayoutSignature(tuple(inputs), tuple(gradients), tuple(outputs))

    def _cuts(self, strategy: Strategy, of: Callable[[Any], Any]) -> dict[str, Axes]:
        """Return the axes of each factor of one tensor.

        `of` gives a joint's factor of the tensor, or a cut in parts. One that leaves the tensor
        whole goes by its own name.
        """
        cuts = dict[str, Axes]()
        for name, axes in strategy.cuts:
            if (parts := self.parts.get(name)) is not None:
                cuts |= parts.axes_of(of(parts), axes) or {name: axes}
            elif name not in self.joints:
                cuts[name] = axes
        for name, axes in strategy.cuts:
            if (joint := self.joints.get(name)) is not None:
                factor = of(joint) or name
                cuts[factor] = (*cuts.get(factor, ()), *axes)
        return cuts


def _layout(dims: tuple[Dim, ...], cuts: Mapping[str, Axes], partial: Sequence[str]) -> Layout:
    axes_of_dims = (next((cuts[factor] for factor in dim if factor in cuts), ()) for dim in dims)
    return Layout(*axes_of_dims, partial=partial)


def _lacking(dims: tuple[Dim, ...], cuts: Mapping[str, Axes]) -> list[str]:
    """Return the axes that cut factors which a tensor lacks."""
    factors_of_tensor = {factor for dim in dims for factor in dim}
    return [
        axis for factor, axes in cuts.items() if factor not in factors_of_tensor for axis in axes
    ]
