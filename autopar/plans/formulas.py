"""Formulas: operators and movements with their cost as formula and number, one line each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.cluster import Device
from autopar.collectives import Movement, redistribute
from autopar.collectives.redistribution import FREE
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.operator_costs import rooflines
from autopar.cost.rooflines import COLLECTIVES, HIDDEN, collective_values
from autopar.layout import Placement
from autopar.search.candidates import Candidates
from autopar.search.reshard_table import ReshardTerms, reshard_table
from autopar.strategies import KernelCall
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType

REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class PricedChange:
    """The seconds and formulas of bringing one tensor from the layout it has to another."""

    tensor: str  # the value
    neighbour: str  # the operator that gives it, or wants it
    before: str  # types
    after: str
    seconds: float
    formulas: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutChange:
    """A change of one value's placement on the way to a reader."""

    neighbour: str  # the operator that gives it, or wants it
    first: Placement
    second: Placement
    meanwhile: float  # seconds that are computed beside what brings its gradient back
    learns: bool  # the readers have a gradient for it


def price_change(
    value: fx.Node, change: LayoutChange, price: ClusterPrice, *, of_parameters: bool
) -> PricedChange:
    """Return the seconds and formulas of a change of `value`, forward and backward.

    `of_parameters`: sums of its gradient go in buckets.
    """
    first, second, learns = change.first, change.second, change.learns
    val, differentiable = info(value).val, info(value).differentiable
    shape, itemsize, mesh = tuple(val.shape), val.dtype.itemsize, price.mesh
    parts = {*info(value).parts, *first.layout.parts, *second.layout.parts}
    if of_parameters and first.pending and {*second.pending} <= {*first.pending}:
        # A whole gradient becomes one rank's term of the sum.
        first, second = Placement(first.layout), Placement(second.layout)
    table = reshard_table(mesh, val.ndim, tuple(sorted(parts)))
    seconds = math.inf
    if first is second or (first in table.index and second in table.index and not first.pending):
        terms = ReshardTerms(itemsize, price, differentiable, learns)
        all_pairs = table.seconds(shape, terms)
        seconds = float(all_pairs[table.index[first], table.index[second]])
    added = tuple(axis for axis in second.pending if axis not in first.pending)
    lines: list[str] = []
    steps: tuple[Movement, ...] = ()
    reduction = math.nan  # seconds of the last step, if its backward is a sum
    overlap = {"o": price.cluster.device.overlap, "K": change.meanwhile}
    if first is not second and seconds > 0 and math.isfinite(seconds):
        layout, rest = first.layout, Placement(second.layout, added)
        steps = redistribute(layout, rest, shape, itemsize, mesh, price, differentiable, learns)
        for step in steps:
            moved, link = step.apply(layout), price.link(step.axes)
            size = itemsize * max(math.prod(x.largest_shape(shape, mesh)) for x in (layout, moved))
            kinds = {"forward": step.kind}
            if learns:
                kinds["backward"] = step.backward
            for way, kind in kinds.items():
                if kind not in FREE:
                    formula = COLLECTIVES[kind].explain(**collective_values(kind, link, size))
                    lines.append(f"{way} over {'*'.join(step.axes)}: {formula} s, {link.level}")
            layout = moved
            if step.backward in REDUCTIONS:
                reduction = float(price.seconds(step.backward, step.axes, size))
    if of_parameters and learns and first.layout == second.layout and seconds:
        size = itemsize * math.prod(first.layout.largest_shape(shape, mesh))
        once = float(price.bucketed(added, size))
        seconds = once - HIDDEN(C=once, **overlap)
        buckets = f"buckets of {price.buffer_bytes:,} bytes"
        lines.append(f"summed in {buckets}, which share the latency: {once:.6g} s")
        lines.append(f"less what backward hides: {HIDDEN.explain(C=once, **overlap)} s")
    elif added and learns and change.meanwhile and len(steps) == 1 and math.isfinite(reduction):
        seconds -= HIDDEN(C=reduction, **overlap)
        hidden = HIDDEN.explain(C=reduction, **overlap)
        lines.append(f"less what the gradients of weights hide: {hidden} s")
    before, after = (str(TensorType.of(val, state.layout)) for state in (first, second))
    return PricedChange(value.name, change.neighbour, before, after, seconds, tuple(lines))


def operator_formulas(candidates: Candidates, index: int, device: Device) -> tuple[str, ...]:
    """Return the roofline of one strategy as formulas, forward and backward."""
    facts, work = candidates.facts, candidates.work
    if facts is None:
        return ("a mark: nothing is computed",)
    if facts.is_view:
        return ("a view: nothing is computed",)
    lines = []
    for way, (formula, values) in rooflines(facts, work, device).items():
        symbols = {name: v[index] if np.ndim(v) else v for name, v in values.items()}
        lines.append(f"{way}: {formula.explain(**symbols)} s")
    if candidates.inside[index]:
        call = KernelCall.of(facts.rule, candidates.strategies[index])
        joint = None if call is None else call.kernel.joint
        assumed = f", {joint.assumes}" if joint is not None and joint.assumes else ""
        what = f"messages and pieces in its kernel{assumed}"
        lines.append(f"{what}: {candidates.inside[index]:.6g} s")
    return tuple(lines)
