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
from autopar.layout import Placement, TensorType
from autopar.search.candidates import Candidates
from autopar.search.reshard_table import reshard_table
from autopar.strategies import KernelCall
from autopar.strategies.node_info import info

REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Edge:
    """What it takes to bring one tensor from the layout it has to the one that is wanted."""

    tensor: str  # the value
    neighbour: str  # who gives it, or who wants it
    before: str  # types
    after: str
    seconds: float
    formulas: tuple[str, ...] = ()


def edge(
    value: fx.Node,
    neighbour: str,
    first: Placement,
    second: Placement,
    price: ClusterPrice,
    of_parameters: bool,
    meanwhile: float,
    learns: bool,
) -> Edge:
    """The way from one state of `value` to another, whose readers have a gradient for it or not.

    `of_parameters`: sums of its gradient go in buckets. `meanwhile`: seconds of what is computed
    beside what brings its gradient back."""
    val, back = info(value).val, (info(value).differentiable, learns)
    shape, itemsize, mesh = tuple(val.shape), val.dtype.itemsize, price.mesh
    parts = {*info(value).parts, *first.layout.parts, *second.layout.parts}
    if of_parameters and first.pending and {*second.pending} <= {*first.pending}:
        # A whole gradient becomes one rank's term of the sum.
        first, second = Placement(first.layout), Placement(second.layout)
    table = reshard_table(mesh, val.ndim, tuple(sorted(parts)))
    seconds = math.inf
    if first is second or (first in table.index and second in table.index and not first.pending):
        all_pairs = table.seconds(shape, itemsize, price, *back)
        seconds = float(all_pairs[table.index[first], table.index[second]])
    added = tuple(axis for axis in second.pending if axis not in first.pending)
    lines: list[str] = []
    steps: tuple[Movement, ...] = ()
    last: tuple[str, tuple[str, ...], float] | None = None  # of the steps, what it is backward
    beside = {"o": price.cluster.device.overlap, "K": meanwhile}
    if first is not second and seconds > 0 and math.isfinite(seconds):
        layout, rest = first.layout, Placement(second.layout, added)
        steps = redistribute(layout, rest, shape, itemsize, mesh, price, *back)
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
            layout, last = moved, (step.backward, step.axes, size)
    if of_parameters and learns and first.layout == second.layout and seconds:
        size = itemsize * math.prod(first.layout.largest_shape(shape, mesh))
        once = float(price.bucketed(added, size))
        seconds = once - HIDDEN(C=once, **beside)
        buckets = f"buckets of {price.buffer_bytes:,} bytes"
        lines.append(f"summed in {buckets}, which share the latency: {once:.6g} s")
        lines.append(f"less what backward hides: {HIDDEN.explain(C=once, **beside)} s")
    elif (
        added
        and learns
        and meanwhile
        and len(steps) == 1
        and last is not None
        and last[0] in REDUCTIONS
    ):
        reduced = float(price.seconds(*last))
        seconds -= HIDDEN(C=reduced, **beside)
        hidden = HIDDEN.explain(C=reduced, **beside)
        lines.append(f"less what the gradients of weights hide: {hidden} s")
    before, after = (str(TensorType.of(val, state.layout)) for state in (first, second))
    return Edge(value.name, neighbour, before, after, seconds, tuple(lines))


def operator_formulas(candidates: Candidates, index: int, device: Device) -> tuple[str, ...]:
    """The roofline of one strategy, forward and backward."""
    facts, work = candidates.facts, candidates.work
    if facts is None:
        return ("a mark: nothing is computed",)
    if facts.is_view:
        return ("a view: nothing is computed",)
    lines = []
    for way, (formula, values) in rooflines(facts, work, device).items():
        here = {name: value[index] if np.ndim(value) else value for name, value in values.items()}
        lines.append(f"{way}: {formula.explain(**here)} s")
    if candidates.inside[index]:
        call = KernelCall.of(facts.rule, candidates.strategies[index])
        joint = None if call is None else call.kernel.joint
        assumed = f", {joint.assumes}" if joint is not None and joint.assumes else ""
        what = f"messages and pieces in its kernel{assumed}"
        lines.append(f"{what}: {candidates.inside[index]:.6g} s")
    return tuple(lines)
