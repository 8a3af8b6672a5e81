"""Candidates: the strategies of one operator that the search weighs, and what each costs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import copied_parameter
from autopar.cluster import Device
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.deferred_reductions import weight_gradient_seconds
from autopar.cost.joint_kernels import ComputeSeconds, joint_message_cost
from autopar.cost.operator_costs import (
    OperatorWork,
    ShardSizes,
    extra_saved_bytes,
    facts_of,
    operator_seconds,
    operator_work,
)
from autopar.cost.state_price import NodeCost
from autopar.errors import unforeseen
from autopar.layout import Parts, Placement, axes_of, parts_of
from autopar.mesh import Mesh
from autopar.search.reshard_table import Placements, reshard_table
from autopar.strategies import KernelCall, Rule, Strategy, tensor_inputs
from autopar.strategies.intermediate_work import NO_WORK
from autopar.strategies.layout_signature import LayoutSignatures
from autopar.strategies.node_info import info
from autopar.strategies.rule import Facts

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The strategies of one kind of call. Calls of one kind share this object."""

    facts: Facts | None  # None: a mark, which computes nothing
    strategies: tuple[Strategy, ...]
    inputs: tuple[Placements, ...]  # for each input, what each strategy wants
    results: tuple[Placements, ...]  # for each output, what each strategy gives
    forward: Array
    backward: Array
    inside: Array  # seconds of movements that a kernel brings along, both ways
    inside_forward: Array  # of these, of a kernel that ranks carry out together
    extra: Array  # bytes kept for backward besides inputs and output
    work: OperatorWork

    @property
    def outputs(self) -> Placements:
        """What each strategy gives, of the first output."""
        return self.results[0]

    @cached_property
    def cost(self) -> Array:
        return self.forward + self.backward + self.inside

    @cached_property
    def weight_seconds(self) -> Array:
        """Of a linear, what the gradient of its weight takes."""
        assert self.facts is not None
        return weight_gradient_seconds(self.facts, self.backward)

    @cached_property
    def least(self) -> float:
        return float(self.cost.min())

    def taken(self, kept: list[int]) -> Candidates:
        """Only the strategies at `kept`."""
        return Candidates(
            self.facts,
            tuple(self.strategies[i] for i in kept),
            tuple(Placements(states[i] for i in kept) for states in self.inputs),
            tuple(Placements(states[i] for i in kept) for states in self.results),
            self.forward[kept],
            self.backward[kept],
            self.inside[kept],
            self.inside_forward[kept],
            self.extra[kept],
            OperatorWork(*(part[kept] for part in self.work)),
        )


class NodeClasses:
    """All kinds of calls of one captured graph on one mesh, each looked at once."""

    def __init__(
        self,
        captured: Captured,
        mesh: Mesh,
        device: Device,
        price: ClusterPrice,
        microbatches: int = 1,
    ) -> None:
        """The seconds are those of one of so many runs in a step."""
        self.mesh, self.device, self.price, self.microbatches = mesh, device, price, microbatches
        self._classes, self._rules = captured.classes, captured.priced
        self._candidates: dict[tuple[int, bool, bool], Candidates] = {}
        self._places: dict[int, list[int]] = {}

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The tensor inputs of a call, in the order of its rule."""
        kind, given = self._classes[node.name], node.all_input_nodes
        if kind not in self._places:
            found: list[fx.Node] = []
            if self.rule(node) is not None:
                found.extend(tensor_inputs(node))
            else:
                fx.map_arg((node.args, node.kwargs), found.append)
            self._places[kind] = [given.index(value) for value in found]
        return [given[place] for place in self._places[kind]]

    def rule(self, node: fx.Node) -> Rule | None:
        """What a call costs follows from it."""
        return self._rules[node.name]

    def candidates(self, node: fx.Node, every: bool = False) -> Candidates:
        """The candidates of a call; `every` strategy, in every order, if asked."""
        kind = (self._classes[node.name], every, copied_parameter(node) is not None)
        if kind not in self._candidates:
            try:
                self._candidates[kind] = self._make(node, every)
            except Exception as error:
                raise unforeseen("the search weighs", node, error) from error
        return self._candidates[kind]

    def _make(self, node: fx.Node, every: bool) -> Candidates:
        rule, inputs = self.rule(node), tuple(self.inputs(node))
        if rule is None:
            return _mark(node, inputs)
        facts = facts_of(node, rule, inputs)
        strategies = rule.strategies(self.mesh, ordered=every)
        if rule.is_heavy and not every:
            strategies = [strategy for strategy in strategies if not strategy.passes]
        pieces = ShardSizes(rule, strategies, self.mesh)
        done = operator_work(facts, pieces)
        forward, backward = operator_seconds(facts, done, self.device)
        if copied_parameter(node) is not None:  # made once a step
            forward = forward / self.microbatches
        learns = tuple(info(value).differentiable for value in inputs)
        return Candidates(
            facts,
            tuple(strategies),
            *_layouts(rule.signatures, tuple(strategies), learns),
            forward,
            backward,
            *self._moved(node, facts, strategies, pieces, (forward, backward)),
            extra_saved_bytes(facts, pieces),
            done,
        )

    def _moved(
        self,
        node: fx.Node,
        facts: Facts,
        strategies: Sequence[Strategy],
        pieces: ShardSizes,
        computed: tuple[Array, Array],
    ) -> tuple[Array, Array]:
        """Seconds of what the kernel of a call moves, both ways, and forward with others."""
        found, forward = np.zeros(len(strategies)), np.zeros(len(strategies))
        if facts.rule.kernels or facts.rule.joints:
            for i, (strategy, *own) in enumerate(zip(strategies, *computed)):
                together = self._together(facts, strategy, ComputeSeconds(*map(float, own)))
                expanded = self._inside(node, facts, strategy, pieces, i)
                found[i] = expanded + together.forward + together.backward
                forward[i] = together.forward
        return found, forward

    def _inside(
        self, node: fx.Node, facts: Facts, strategy: Strategy, pieces: ShardSizes, index: int
    ) -> float:
        """What the all-gathers of an expanding kernel take."""
        call = KernelCall.of(facts.rule, strategy)
        if call is None or (expansion := call.kernel.expand) is None:
            return 0.0
        rows = float(pieces.elements(facts.rule.outputs[0])[index])
        itemsize = torch.promote_types(info(node).val.dtype, torch.float32).itemsize
        total, columns = 0.0, float(expansion.columns)
        for axis in reversed(call.axes):
            columns *= self.mesh[axis]
            total += self.price.seconds("all_gather", (axis,), rows * columns * itemsize)
        return total

    def _together(self, facts: Facts, strategy: Strategy, computed: ComputeSeconds) -> NodeCost:
        """What a joint kernel takes besides."""
        return joint_message_cost(facts, strategy, self.price, self.device.overlap, computed)


@lru_cache(maxsize=1 << 12)
def _layouts(
    signatures: LayoutSignatures, strategies: tuple[Strategy, ...], learns: tuple[bool, ...]
) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
    """For each input, what each strategy wants; for each output, what each gives."""
    found = [signatures.of(strategy) for strategy in strategies]
    wanted = zip(*(each.wants(learns) for each in found))
    given = zip(*(map(Placement, each.outputs) for each in found))
    return tuple(map(Placements, wanted)), tuple(map(Placements, given))


def _mark(node: fx.Node, inputs: tuple[fx.Node, ...]) -> Candidates:
    nothing = np.zeros(1)
    whole = tuple(Placements([Placement.whole(info(i).val.ndim)]) for i in inputs)
    return Candidates(
        None,
        (Strategy(),),
        whole,
        tuple(Placements([Placement.whole(getattr(v, "ndim", 0))]) for v in info(node).values),
        *(nothing,) * 5,
        OperatorWork(*(nothing,) * 6, np.zeros((1, len(NO_WORK)))),
    )


def uncut(candidates: Candidates) -> int:
    """The strategy that runs an operator whole on every rank."""
    return next(i for i, strategy in enumerate(candidates.strategies) if not strategy.axes)


def storage_states(shape: tuple[int, ...], mesh: Mesh, parts: Parts = ()) -> Placements:
    """The layouts in which a parameter may be stored: each axis cuts one dim, or none; one dim is
    in parts at most, which one axis cuts, as DTensors can be made whole."""
    return Placements(
        state
        for state in reshard_table(mesh, len(shape), parts).starts
        if not state.partial and all(_fits(dim, size, mesh) for dim, size in zip(state.dims, shape))
        if sum(len(axes_of(state.dims[dim])) for dim, _ in state.layout.parts) <= 1
    )


def _fits(dim: tuple[str, ...], size: int, mesh: Mesh) -> bool:
    pieces, parts = mesh.degree(axes_of(dim)), parts_of(dim)
    return size % (parts * pieces) == 0 if parts else not dim or pieces <= size
