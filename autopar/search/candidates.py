"""Candidates: the strategies of one operator that the search weighs, with the seconds of each.

Calls of one kind, as those of equal blocks, share their candidates. What it takes to move values
between operators is not in here: `edge_costs` has that.
"""

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
    """Hold the strategies of one kind of call. Calls of one kind share this object."""

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
        """Return the placement that each strategy gives the first output."""
        return self.results[0]

    @cached_property
    def cost(self) -> Array:
        """Return the seconds of each strategy both ways, movements of kernels included."""
        return self.forward + self.backward + self.inside

    @cached_property
    def weight_seconds(self) -> Array:
        """Return the seconds that the gradient of a linear's weight takes under each strategy."""
        assert self.facts is not None
        return weight_gradient_seconds(self.facts, self.backward)

    @cached_property
    def least(self) -> float:
        """Return the seconds of the fastest strategy."""
        return float(self.cost.min())

    def taken(self, indices: list[int]) -> Candidates:
        """Return the candidates with only the strategies at `indices`."""
        return Candidates(
            self.facts,
            tuple(self.strategies[i] for i in indices),
            tuple(Placements(states[i] for i in indices) for states in self.inputs),
            tuple(Placements(states[i] for i in indices) for states in self.results),
            self.forward[indices],
            self.backward[indices],
            self.inside[indices],
            self.inside_forward[indices],
            self.extra[indices],
            OperatorWork(*(part[indices] for part in self.work)),
        )


class NodeClasses:
    """Find the candidates of all calls of one captured graph on one mesh, once for each kind."""

    def __init__(
        self,
        captured: Captured,
        mesh: Mesh,
        device: Device,
        price: ClusterPrice,
        microbatches: int = 1,
    ) -> None:
        """Price a run of the program for one of the step's `microbatches`, in seconds."""
        self.mesh, self.device, self.price, self.microbatches = mesh, device, price, microbatches
        self._classes, self._rules = captured.classes, captured.priced
        self._candidates: dict[tuple[int, bool, bool], Candidates] = {}
        self._places: dict[int, list[int]] = {}

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensor inputs of a call, in the order of its rule."""
        kind, arguments = self._classes[node.name], node.all_input_nodes
        if kind not in self._places:
            tensors: list[fx.Node] = []
            if self.rule(node) is not None:
                tensors.extend(tensor_inputs(node))
            else:
                fx.map_arg((node.args, node.kwargs), tensors.append)
            self._places[kind] = [arguments.index(value) for value in tensors]
        return [arguments[place] for place in self._places[kind]]

    def rule(self, node: fx.Node) -> Rule | None:
        """Return the rule from which a call is priced; `None` for a mark."""
        return self._rules[node.name]

    def candidates(self, node: fx.Node, *, in_all_orders: bool = False) -> Candidates:
        """Return the candidates of a call, if `in_all_orders` with every order of axes on a dim."""
        kind = (self._classes[node.name], in_all_orders, copied_parameter(node) is not None)
        if kind not in self._candidates:
            try:
                self._candidates[kind] = self._make(node, in_all_orders=in_all_orders)
            except Exception as error:
                raise unforeseen("the search weighs", node, error) from error
        return self._candidates[kind]

    def _make(self, node: fx.Node, *, in_all_orders: bool) -> Candidates:
        rule, inputs = self.rule(node), tuple(self.inputs(node))
        if rule is None:
            return _mark(node, inputs)
        facts = facts_of(node, rule, inputs)
        strategies = rule.strategies(self.mesh, ordered=in_all_orders)
        if rule.is_heavy and not in_all_orders:
            strategies = [strategy for strategy in strategies if not strategy.passes]
        pieces = ShardSizes(rule, strategies, self.mesh)
        operations = operator_work(facts, pieces)
        forward, backward = operator_seconds(facts, operations, self.device)
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
            operations,
        )

    def _moved(
        self,
        node: fx.Node,
        facts: Facts,
        strategies: Sequence[Strategy],
        pieces: ShardSizes,
        computed: tuple[Array, Array],
    ) -> tuple[Array, Array]:
        """Return the seconds of a kernel's movements: in all, and forward in joint kernels."""
        moved, forward = np.zeros(len(strategies)), np.zeros(len(strategies))
        if facts.rule.kernels or facts.rule.joints:
            for i, (strategy, *compute_seconds) in enumerate(zip(strategies, *computed)):
                joint_cost = self._together(
                    facts, strategy, ComputeSeconds(*map(float, compute_seconds))
                )
                gather_seconds = self._inside(node, facts, strategy, pieces, i)
                moved[i] = gather_seconds + joint_cost.forward + joint_cost.backward
                forward[i] = joint_cost.forward
        return moved, forward

    def _inside(
        self, node: fx.Node, facts: Facts, strategy: Strategy, pieces: ShardSizes, index: int
    ) -> float:
        """Return the seconds of the all-gathers in an expanding kernel."""
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
        """Return the cost of the messages in a joint kernel that computation does not hide."""
        return joint_message_cost(facts, strategy, self.price, self.device.overlap, computed)


@lru_cache(maxsize=1 << 12)
def _layouts(
    signatures: LayoutSignatures, strategies: tuple[Strategy, ...], learns: tuple[bool, ...]
) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
    """Return what each strategy wants of each input, and what each gives for each output."""
    under = [signatures.of(strategy) for strategy in strategies]
    wanted = zip(*(signature.wants(learns) for signature in under))
    results = zip(*(map(Placement, signature.outputs) for signature in under))
    return tuple(map(Placements, wanted)), tuple(map(Placements, results))


def _mark(node: fx.Node, inputs: tuple[fx.Node, ...]) -> Candidates:
    """Return the one candidate of a mark, which keeps its value whole and takes no time."""
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
    """Return the index of the strategy that runs an operator whole on every rank."""
    return next(i for i, strategy in enumerate(candidates.strategies) if not strategy.axes)


def storage_states(shape: tuple[int, ...], mesh: Mesh, parts: Parts = ()) -> Placements:
    """Return the layouts in which a parameter may be stored.
    Each axis cuts one dim, or none. One dim at most is in parts, which one axis cuts, as DTensors
    can be made whole."""
    return Placements(
        state
        for state in reshard_table(mesh, len(shape), parts).starts
        if not state.partial and all(_fits(dim, size, mesh) for dim, size in zip(state.dims, shape))
        if sum(len(axes_of(state.dims[dim])) for dim, _ in state.layout.parts) <= 1
    )


def _fits(dim: tuple[str, ...], size: int, mesh: Mesh) -> bool:
    """Return whether a dim of `size` elements is large enough to be cut so."""
    pieces, parts = mesh.degree(axes_of(dim)), parts_of(dim)
    return size % (parts * pieces) == 0 if parts else not dim or pieces <= size
