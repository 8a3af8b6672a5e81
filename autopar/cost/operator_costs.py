"""The cost of one operator under each of its strategies: seconds both ways, and bytes saved.

The roofline of `rooflines` decides; a rule gives the FLOPs and the tensors that backward saves. All
strategies of an operator are computed at once, as arrays, from the elements of the busiest rank's
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.capture.host import CROSSINGS
from autopar.capture.randomness import is_random
from autopar.cluster import Device
from autopar.cost.formula import Formula
from autopar.cost.rooflines import operator_formula, operator_values
from autopar.mesh import Mesh
from autopar.strategies import ExtraTensor, JointCut, Rule, Strategy
from autopar.strategies.intermediate_work import IntermediateWork
from autopar.strategies.node_info import info
from autopar.strategies.registry import is_view
from autopar.strategies.results import tensors_of
from autopar.strategies.rule import Dim, Facts

Array = NDArray[np.float64]
SymbolValues = dict[str, Any]  # by symbol: a number, or one for each strategy

MANY_FLOPS = 4  # FLOPs per element: with more, what is no product is priced by its arithmetic, too


class OperatorWork(NamedTuple):
    """FLOPs and bytes of each strategy, forward and backward, on the busiest rank."""

    flops: Array
    read: Array
    written: Array
    backward_flops: Array
    backward_read: Array
    backward_written: Array
    between: Array  # by the fields of `IntermediateWork`


def _output_factor(joint: JointCut) -> str | None:
    return joint.outputs[0]


class ShardSizes:
    """The largest piece of each factor under each strategy."""

    def __init__(self, rule: Rule, strategies: Sequence[Strategy], mesh: Mesh) -> None:
        self.rule, self.strategies, self.count = rule, strategies, len(strategies)
        self.joints = [
            (index, rule.joints[name], float(mesh.degree(axes)))
            for index, strategy in enumerate(strategies)
            for name, axes in strategy.cuts
            if name in rule.joints
        ]
        lengths: dict[tuple[str, tuple[str, ...]], float] = {}
        cuts = [rule.cuts_of(strategy) for strategy in strategies]
        self.lengths: dict[str, Array] = {}
        for factor, size in rule.sizes.items():
            column = np.full(self.count, float(size))
            for index, axes_of_factor in enumerate(cuts):
                axes = axes_of_factor.get(factor)
                if axes:
                    if (factor, axes) not in lengths:
                        length = size
                        for axis in axes:
                            length = -(-length // mesh[axis])
                        lengths[factor, axes] = float(length)
                    column[index] = lengths[factor, axes]
            self.lengths[factor] = column

    def elements(
        self, dims: Sequence[Dim], cut: Callable[[JointCut], str | None] = _output_factor
    ) -> Array:
        """Return the elements of a tensor's largest piece; `cut`: the factor of the tensor that a
        joint cuts, by default that of the output."""
        total = np.ones(self.count)
        for dim in dims:
            for factor in dim:
                total = total * self.lengths[factor]
        for index, joint, degree in self.joints:
            lost = cut(joint)
            if lost is not None and any(lost in dim for dim in dims):
                length = self.lengths[lost][index]
                total[index] *= math.ceil(length / degree) / length
        return total

    def inputs(self, facts: Facts) -> list[Array]:
        """Return the bytes of each input."""
        return [
            self.elements(dims, lambda joint: joint.inputs[place]) * itemsize  # noqa: B023
            for place, (dims, itemsize) in enumerate(zip(self.rule.inputs, facts.itemsizes))
        ]

    def outputs(self, facts: Facts) -> list[Array]:
        """Return the bytes of each output."""
        return [
            self.elements(dims, lambda joint: joint.outputs[place]) * dtype.itemsize  # noqa: B023
            for place, (dims, dtype) in enumerate(zip(self.rule.outputs, facts.dtypes))
        ]

    def bytes(self, extra: ExtraTensor, dtype: torch.dtype) -> Array:
        """Return the bytes of a further saved tensor; `dtype`: that of the output."""
        return self.elements(extra.dims) * (extra.dtype or dtype).itemsize

    def kept_by_joints(self, dtype: torch.dtype) -> Array:
        """Return the bytes that the kernels of joints save besides; `dtype`: that of the output."""
        total = np.zeros(self.count)
        for index, joint, _ in self.joints:
            for factors in joint.keeps:
                dims = [(factor,) for factor in factors if factor in self.lengths]
                total[index] += self.elements(dims)[index] * dtype.itemsize
        return total

    def share(self) -> Array:
        """Return the part of the operator's work that the busiest rank has."""
        total = np.ones(self.count)
        for factor, size in self.rule.sizes.items():
            total = total * (self.lengths[factor] / max(size, 1))
        for index, _, degree in self.joints:
            total[index] /= degree
        if (rows := self.rule.triangle) is not None:
            total[self.lengths[rows] < self.rule.sizes[rows]] *= 2
            for index, joint, _ in self.joints:
                total[index] *= 2 if rows in joint.inputs else 1
        return total


def operator_work(facts: Facts, pieces: ShardSizes) -> OperatorWork:
    """Return the work of one call under all strategies."""
    rule = facts.rule
    nothing = np.zeros(pieces.count)
    between = np.multiply.outer(pieces.share(), rule.intermediate)
    if facts.is_view:
        return OperatorWork(*(nothing,) * 6, between)
    inputs, outputs = pieces.inputs(facts), pieces.outputs(facts)
    read, output = sum(inputs, nothing), sum(outputs, nothing)
    # What multiplies nothing and has few FLOPs for its elements is limited by memory alone.
    elements = sum(_elements(rule, dims) for dims in (*rule.inputs, *rule.outputs))
    counts = rule.product or rule.flops > MANY_FLOPS * elements
    flops = rule.flops * pieces.share() if counts else nothing
    learning = [index for index, learns in enumerate(facts.differentiable) if learns]
    if not learning:
        return OperatorWork(flops, read, output, nothing, nothing, nothing, between)
    passes = len(learning) if rule.is_contraction else 1
    extra = sum((pieces.bytes(tensor, facts.dtype) for tensor in rule.saved.extra), nothing)
    saved = sum((inputs[i] for i in rule.saved.inputs if i < len(inputs)), extra)
    saved = saved + output if rule.saved.output else saved
    gradients = sum((inputs[index] for index in learning), nothing)
    if rule.backward_flops is None:
        backward_flops = flops * (passes if rule.is_contraction else 2)
    else:
        backward_flops = rule.backward_flops * pieces.share()
    backward_read = passes * output + saved
    return OperatorWork(
        flops, read, output + extra, backward_flops, backward_read, gradients, between
    )


def rooflines(
    facts: Facts, done: OperatorWork, device: Device
) -> dict[str, tuple[Formula, SymbolValues]]:
    """Return the formulas of "forward" and "backward", each with the values of its symbols."""
    between = IntermediateWork(*done.between.T)
    is_cached = facts.on_host or device.host.is_device
    forward, backward = between[2:4] if is_cached else between[:2]
    more = between[4:] if is_cached else (0.0, 0.0)
    if facts.crosses:
        device = device.host.link
    elif facts.on_host:
        device = device.host.processor
    ways = (
        {}
        if facts.is_view
        else {"forward": (done.flops + more[0], done.read, done.written, forward)}
    )
    if ways and any(facts.differentiable):
        of_gradients = done.backward_read, done.backward_written
        ways["backward"] = done.backward_flops + more[1], *of_gradients, backward
    has_far = facts.rule.product and device.far_seconds > 0
    products = {"forward": 1, "backward": sum(facts.differentiable)}
    return {
        way: (
            operator_formula(flops, passed, has_far=has_far),
            operator_values(
                device, facts.dtype, flops, read, written, between=passed, products=products[way]
            ),
        )
        for way, (flops, read, written, passed) in ways.items()
    }


def operator_seconds(facts: Facts, done: OperatorWork, device: Device) -> tuple[Array, Array]:
    """Return the seconds forward and backward of each strategy."""
    taken = {way: line(**values) for way, (line, values) in rooflines(facts, done, device).items()}
    nothing = np.zeros_like(done.flops)
    return taken.get("forward", nothing), taken.get("backward", nothing)


def _elements(rule: Rule, dims: Sequence[Dim]) -> int:
    return math.prod(rule.sizes[factor] for dim in dims for factor in dim)


def extra_saved_bytes(facts: Facts, pieces: ShardSizes) -> Array:
    """Return the bytes saved for backward on the device, besides the inputs and outputs that the
    operator saves on one rank."""
    total = np.zeros(pieces.count)
    if not any(facts.differentiable) or facts.on_host:
        return total
    usual = facts.rule.saved
    for extra in usual.extra:
        total = total + pieces.bytes(extra, facts.dtype)
    for index, strategy in enumerate(pieces.strategies if facts.rule.saved_by_joint else ()):
        saved = facts.rule.saved_under(strategy)
        if saved is not usual:
            total[index] = sum(pieces.bytes(extra, facts.dtype)[index] for extra in saved.extra)
            inputs = {*saved.inputs_for(facts.differentiable)}
            for place in inputs.difference(usual.inputs_for(facts.differentiable)):
                total[index] += pieces.inputs(facts)[place][index]
            if saved.output and not usual.output:
                total[index] += sum(size[index] for size in pieces.outputs(facts))
    return total + pieces.kept_by_joints(facts.dtype)


def facts_of(node: fx.Node, rule: Rule, inputs: Sequence[fx.Node]) -> Facts:
    """Return the facts of a call that its cost depends on, whichever strategy it gets."""
    return Facts(
        rule,
        tuple(info(value).val.dtype.itemsize for value in inputs),
        tuple(info(node).learns and info(value).learns for value in inputs),
        tuple(tensor.dtype for tensor in tensors_of(node)),
        is_view(node),
        info(node).on_host,
        node.target in CROSSINGS,
        is_random(node),
    )
