"""State figures: what a setting of states holds and moves, from the sizes of parameters alone.

A planner ranks settings by these figures in microseconds, before any layout is known. They are
those of a plan whose parameters are replicas over the data axes:

    sizes = ParameterSizes.of(captured).on_each_rank(tensor=2)
    held = state_memory(sizes, states, replicas=64)
    mesh, axes = split_mesh(states, ["dp"], Mesh(dp=64, tp=2))
    moved = state_traffic(sizes, states, ClusterPrice(cluster, mesh, states.buffer_bytes), axes)

Copies that live a use, and states on the host, are left out of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from operator import add
from typing import NamedTuple

import numpy as np

from autopar.capture.captured import Captured
from autopar.capture.origins import state_bytes
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.rooflines import HIDDEN
from autopar.states import Factor, StateBytes, States, innermost
from autopar.strategies.node_info import info

Axes = tuple[str, ...]


class ParameterKind(NamedTuple):
    """The facts by which parameters differ in what their states hold and move."""

    element: StateBytes  # bytes of one element
    learns: bool


@dataclass(frozen=True)
class ParameterSizes:
    """The parameters of one rank: of each kind, elements of a parameter and how many have them."""

    kinds: Mapping[ParameterKind, Mapping[int, float]]

    @classmethod
    def of(cls, captured: Captured) -> ParameterSizes:
        """Return the sizes of the parameters of a program that are on devices, uncut."""
        kinds: dict[ParameterKind, Counter[int]] = {}
        for node in captured.graph.find_nodes(op="placeholder"):
            if node.name in captured.parameters and not info(node).on_host:
                kind = ParameterKind(state_bytes(node), info(node).learns)
                kinds.setdefault(kind, Counter())[info(node).val.numel()] += info(node).count
        return cls(kinds)

    def on_each_rank(self, *, tensor: int = 1, stages: int = 1) -> ParameterSizes:
        """Return the sizes where each parameter is cut in `tensor` parts, and stages share all."""
        kinds: dict[ParameterKind, dict[int, float]] = {}
        for kind, counts in self.kinds.items():
            kinds[kind] = defaultdict(float)
            for elements, count in counts.items():
                kinds[kind][-(-elements // tensor)] += count / stages
        return ParameterSizes(kinds)


@dataclass(frozen=True)
class StateMemory:
    """The bytes that one rank holds of the states of parameters."""

    parameters: float  # from step to step
    gradients: float
    optimizer: float
    copies: float  # that live a step

    @property
    def total(self) -> float:
        """Return the bytes in a step that has all gradients."""
        return self.parameters + self.gradients + self.optimizer + self.copies


def state_memory(sizes: ParameterSizes, states: States, replicas: int) -> StateMemory:
    """Return the bytes of states on a device, whose factors divide the number of replicas."""
    total = np.zeros(4)
    for kind, counts in sizes.kinds.items():
        stored, summed, updated = (
            replicas if factor == "all" else factor for factor in _factors(states, kind)
        )
        held, element = partial(_elements, counts), kind.element
        is_copied = stored != updated or element.copy != element.master
        total += np.array(
            [
                held(updated) * element.master,
                held(summed) * element.gradient * kind.learns,
                held(updated) * element.optimizer * kind.learns,
                held(stored) * element.copy * is_copied,
            ]
        )
    return StateMemory(*map(float, total))


def _elements(counts: Mapping[int, float], parts: int) -> float:
    """Return the elements of the largest piece of each parameter, all together."""
    return sum(-(-elements // parts) * count for elements, count in counts.items())


@dataclass(frozen=True)
class StateTraffic:
    """The seconds of the gathers and gradient sums of one rank, before computing hides any."""

    # For each micro-batch.
    forward: float = 0.0  # gathers
    backward: float = 0.0  # gathers, and sums as far as gradients are cut while they add up
    # Once a step.
    gathered: float = 0.0
    summed: float = 0.0

    def __add__(self, other: StateTraffic) -> StateTraffic:
        return StateTraffic(*map(add, astuple(self), astuple(other)))

    def seconds(self, microbatches: int) -> float:
        """Return the seconds of a step."""
        return microbatches * (self.forward + self.backward) + self.gathered + self.summed

    def least_shown(
        self, microbatches: int, *, forward: float, backward: float, overlap: float
    ) -> float:
        """Return a lower bound of the seconds of a step that computing cannot hide.

        `forward` and `backward` are the seconds that a rank computes for one micro-batch. Each
        parameter's movements hide behind its own readers, so all together behind all of these. In
        backward, copies and sums hide each behind all that is computed.
        """

        def shown(moved: float, computed: float) -> float:
            return moved - float(HIDDEN(C=moved, o=overlap, K=computed))

        in_each = shown(self.forward, forward) + shown(self.backward, 2 * backward)
        return microbatches * in_each + shown(self.gathered, forward) + shown(self.summed, backward)


def state_traffic(
    sizes: ParameterSizes, states: States, price: ClusterPrice, axes: Sequence[str]
) -> StateTraffic:
    """Return the seconds of the movements of states over the data `axes` of the price's mesh.

    Axes are split where `states` asks for some of their ranks: see `split_mesh`.
    """
    total = StateTraffic()
    axes = tuple(axis for axis in axes if price.mesh[axis] > 1)
    for kind, counts in sizes.kinds.items():
        stored, scattered, updated = (
            innermost(factor, axes, price.mesh) for factor in _factors(states, kind)
        )
        bucketed = _BucketedSeconds(price, counts)
        copy, gradient = kind.element.copy, kind.element.gradient
        use = bucketed("all_gather", copy, (), stored)
        gathered, summed = bucketed("all_gather", copy, stored, updated), 0.0
        backward = use
        if kind.learns:
            at_use = tuple(axis for axis in scattered if axis in stored)
            backward += bucketed("reduce_scatter", gradient, (), at_use)
            backward += bucketed("reduce_scatter", gradient, stored, scattered)
            summed += bucketed("reduce_scatter", gradient, scattered, updated)
            summed += bucketed("all_reduce", gradient, updated, axes)
        total += StateTraffic(use, backward, gathered, summed)
    return total


@dataclass(frozen=True)
class _BucketedSeconds:
    """Prices a collective of each of several parameters, as parts of buckets."""

    price: ClusterPrice
    counts: Mapping[int, float]  # of parameters, by their elements

    def __call__(self, kind: str, itemsize: int, coarse: Axes, fine: Axes) -> float:
        """Return the seconds between pieces that `coarse` cuts and those that `fine` cuts, too."""
        between = tuple(axis for axis in fine if axis not in coarse)
        if not between:
            return 0.0
        pieces = np.ceil(np.array([*self.counts]) / self.price.mesh.degree(coarse))
        seconds = self.price.bucketed(between, pieces * itemsize, kind)
        return float(seconds @ np.array([*self.counts.values()]))


def _factors(states: States, kind: ParameterKind) -> tuple[Factor, ...]:
    """Return in how many parts a parameter is stored, its gradient is summed, and updated."""
    stored = 1 if states.lifetime == "step" else states.parameters
    return (stored, states.gradients, states.optimizer) if kind.learns else (stored,) * 3
