"""Formulas: operators and movements with their cost as formula and number, one line each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.cluster import Device
from autopar.collectives import redistribute
from autopar.cost.model import COLLECTIVES, collective_values, operator_formula, operator_values
from autopar.cost.price import BUCKET_BYTES, ClusterPrice
from autopar.layout import Placement, TensorType
from autopar.mesh import Mesh
from autopar.search.candidates import Candidates
from autopar.search.reshard import reshard_table
from autopar.strategies.node_info import info

FREE = ("identity", "slice")


@dataclass(frozen=True)
class Edge:
    """What it takes to bring one tensor from the layout it has to the one that is wanted."""

    tensor: str  # the value
    neighbour: str  # who gives it, or who wants it
    before: str  # types
    after: str
    seconds: float
    formulas: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "formulas": list(self.formulas)}


def edge(
    value: fx.Node,
    neighbour: str,
    first: Placement,
    second: Placement,
    mesh: Mesh,
    price: ClusterPrice,
    overlap: float | None = None,
) -> Edge:
    """The way from one state of `value` to another. With `overlap` the value is a parameter's:
    sums of its gradient go in buckets, and this part of them is hidden."""
    val, differentiable = info(value).val, info(value).differentiable
    shape, itemsize = tuple(val.shape), val.dtype.itemsize
    table = reshard_table(mesh, val.ndim)
    known = first in table.index and second in table.index
    seconds = math.inf
    if known and not (first.pending and first is not second):
        all_pairs = table.seconds(shape, itemsize, price, differentiable)
        seconds = float(all_pairs[table.index[first], table.index[second]])
    source, target = first.layout, second.layout
    lines: list[str] = []
    if first is not second and seconds > 0 and math.isfinite(seconds):
        layout = source
        rest = Placement(target, set(second.pending) - set(first.pending))
        steps = redistribute(source, rest, shape, itemsize, mesh, price, differentiable)
        for step in steps:
            after = step.apply(layout)
            size = itemsize * max(math.prod(x.largest_shape(shape, mesh)) for x in (layout, after))
            kinds = [("forward", step.kind)]
            kinds += [("backward", step.backward)] if differentiable else []
            over = "*".join(step.axes)
            lines += [
                f"{way} over {over}: {movement_formula(kind, step.axes, size, price)}"
                for way, kind in kinds
                if kind not in FREE
            ]
            layout = after
    if overlap is not None and source == target and seconds:
        axes = tuple(axis for axis in second.pending if axis not in first.pending)
        size = itemsize * math.prod(source.largest_shape(shape, mesh))
        seconds = float(price.bucketed(axes, size)) * (1 - overlap)
        lines.append(f"summed in buckets of {BUCKET_BYTES:,} bytes, which share the latency")
        lines.append(f"times {1 - overlap:g}: backward hides the rest of summing gradients")
    types = [str(TensorType(shape, val.dtype, layout)) for layout in (source, target)]
    return Edge(value.name, neighbour, types[0], types[1], seconds, tuple(lines))


def movement_formula(kind: str, axes: tuple[str, ...], size: float, price: ClusterPrice) -> str:
    """The alpha-beta formula of one collective with the numbers of its link in it."""
    link = price.link(axes)
    return f"{COLLECTIVES[kind].explain(**collective_values(kind, link, size))} s, {link.level}"


def operator_formulas(candidates: Candidates, index: int, device: Device) -> tuple[str, ...]:
    """The roofline of one strategy, forward and backward."""
    facts, work = candidates.facts, candidates.work
    if facts is None or work is None:
        return ("a mark: nothing is computed",)
    if facts.is_view:
        return ("a view: nothing is computed",)
    lines = []
    for way, flops, moved in (
        ("forward", work.flops, work.moved),
        ("backward", work.backward_flops, work.backward_moved),
    ):
        if way == "backward" and not any(facts.differentiable):
            continue
        formula = operator_formula(flops)
        values = operator_values(device, facts.dtype, flops[index], moved[index])
        lines.append(f"{way}: {formula.explain(**values)} s")
    if candidates.inside[index]:
        lines.append(f"movements inside its kernel: {candidates.inside[index]:.6g} s")
    return tuple(lines)
