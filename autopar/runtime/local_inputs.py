"""Local inputs: the global batch, of which each rank brings its slice, from what all ranks say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.strategies.node_info import info

Shape = tuple[int, ...]


def layouts_of(plan: Plan, captured: Captured) -> dict[str, Layout]:
    """Where the inputs of another program lie: as those of the plan, since ranks bring slices."""
    nodes = {node.name: node for node in captured.graph.find_nodes(op="placeholder")}
    placed = plan.decisions.placeholders
    found = {name: placed.get(name) for name in captured.inputs if name is not None}
    for name, layout in found.items():
        if layout is None or layout.ndim != info(nodes[name]).val.ndim:
            raise _other(f"{name}, which the planned call does not have")
    return {name: layout for name, layout in found.items() if layout is not None}


def whole_call(
    plan: Plan, args: tuple, kwargs: Mapping[str, Any], shapes: Sequence[Sequence[Shape]]
) -> tuple[tuple, Mapping[str, Any]]:
    """The call with tensors of the whole shapes, without values, from those that each rank has; by
    rank, and by place among the flat arguments, those by name in the order of names."""
    original = plan.original
    leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in sorted(kwargs)}))
    places = pytree.tree_unflatten(range(len(original.inputs)), original.input_spec)
    named = {name: places[1][name] for name in sorted(places[1])}
    order, planned = pytree.tree_flatten((places[0], named))
    if spec != planned:
        raise _other("other arguments than the planned call has")
    whole = []
    for at, (leaf, place) in enumerate(zip(leaves, order)):
        placeholder = original.inputs[place]
        if not isinstance(leaf, Tensor) or placeholder is None:
            whole.append(leaf)
            continue
        layout = plan.decisions.placeholders[placeholder]
        size = _joined(layout, [found[at] for found in shapes], plan.mesh, placeholder)
        made = torch.empty(size, dtype=leaf.dtype, device="meta")
        whole.append(made.requires_grad_(leaf.requires_grad))
    args, kwargs = pytree.tree_unflatten(whole, spec)
    return args, kwargs


def _joined(layout: Layout, shapes: Sequence[Shape], mesh: Mesh, name: str) -> Shape:
    """The shape of which ranks have these pieces."""
    if layout.ndim != len(shapes[0]):
        raise _other(f"{name} of {len(shapes[0])} dims")
    whole = tuple(
        sum(shapes[rank][dim] for rank in (mesh.groups(axes)[0] if axes else (0,)))
        for dim, axes in enumerate(layout.dims)
    )
    for rank, shape in enumerate(shapes):
        is_small = any(mesh.degree(axes) > n for axes, n in zip(layout.dims, whole))
        if is_small or layout.local_shape(whole, mesh, rank) != tuple(shape):
            raise InvalidInput(
                "with local inputs each rank brings its slice: the pieces of one global batch, the "
                "first ones longer by one where they are uneven",
                got="\n".join(f"rank {r}: {name} {tuple(s)}" for r, s in enumerate(shapes)),
                remedy=f"slices of one batch as {layout} cuts it on {mesh}",
            )
    return whole


def _other(got: str) -> InvalidInput:
    return InvalidInput(
        "with local inputs a call has the arguments of the one that was planned: their layouts say "
        "which slice a rank brings",
        got=got,
        remedy="parallelize again for this call, or hand over global batches",
    )
