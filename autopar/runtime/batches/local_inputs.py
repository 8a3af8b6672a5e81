"""Local inputs: the shapes of the global batch, of which each rank brings its slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.containers import Made
from autopar.capture.decisions import Decision
from autopar.capture.writes import Write
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.strategies.node_info import info
from autopar.text.units import counted

Shape = tuple[int, ...]


def input_layouts(plan: Plan, captured: Captured) -> dict[str, Layout]:
    """Return the layouts of a new program's inputs: the planned ones, since ranks bring slices."""
    nodes = {node.name: node for node in captured.graph.find_nodes(op="placeholder")}
    planned = plan.decisions.placeholders
    layouts = {name: planned.get(name) for name in captured.inputs if name is not None}
    for name, layout in layouts.items():
        if layout is None or layout.ndim != info(nodes[name]).val.ndim:
            raise _unplanned_call(f"{name}, which the planned call does not have")
    return {name: layout for name, layout in layouts.items() if layout is not None}


def refuse_questions_about_slices(plan: Plan) -> None:
    """Refuse questions about the values of inputs that ranks have in slices."""
    placed, original = plan.decisions.placeholders, plan.original
    containers = [container for content in original.contents for container in content.made]
    effects: list[Decision | Write | Made] = [*original.decisions, *original.writes, *containers]
    for effect in effects:
        cut = [name for name in effect.inputs.values() if placed[name].axes]
        if cut:
            raise InvalidInput(
                "with local inputs forward asks nothing of values that ranks have slices of, and "
                "writes to none: each would do so for its own",
                got=f"a {'question' if isinstance(effect, Decision) else 'write'} to "
                + ", ".join(cut),
                remedy="compute with tensors (torch.where, masks), decide before the call and hand "
                "over a Python value; or hand every rank the global batch",
                source=effect.source,
            )


def join_call(
    plan: Plan, args: tuple, kwargs: Mapping[str, Any], shapes: Sequence[Sequence[Shape]]
) -> tuple[tuple, Mapping[str, Any]]:
    """Return the call with whole tensors, without values. `shapes` has the shapes of all slices, by
    rank and by position among the flat arguments, keyword arguments in the order of names."""
    leaves, spec = flatten_call(args, kwargs)
    planned = planned_inputs(plan)
    whole = []
    for at, (path, leaf) in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            whole.append(leaf)
            continue
        placeholder = planned.get(path)
        if placeholder is None:
            raise _unplanned_call(
                f"a tensor as {_path_text(path)}, where the planned call has none"
            )
        layout = plan.decisions.placeholders[placeholder]
        size = _joined_shape(
            layout, [of_rank[at] for of_rank in shapes], plan.whole_mesh, placeholder
        )
        tensor = torch.empty(size, dtype=leaf.dtype, device="meta")
        whole.append(tensor.requires_grad_(leaf.requires_grad))
    args, kwargs = pytree.tree_unflatten(whole, spec)
    return args, kwargs


def planned_inputs(plan: Plan) -> dict[Any, str | None]:
    """Return the placeholder of each argument path of the planned call; None: not a tensor."""
    inputs, spec = plan.original.inputs, plan.original.input_spec
    args, kwargs = pytree.tree_unflatten(range(len(inputs)), spec)
    return {path: inputs[place] for path, place in flatten_call(args, kwargs)[0]}


def flatten_call(args: tuple, kwargs: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the arguments of a call with their paths, keyword arguments in the order of names."""
    return pytree.tree_flatten_with_path((args, {name: kwargs[name] for name in sorted(kwargs)}))


def _path_text(path: Any) -> str:
    """Return the path of an argument as text: args[0], kwargs['mask']."""
    first, *inside = path
    return ("args", "kwargs")[first.idx] + pytree.keystr(tuple(inside))


def _joined_shape(layout: Layout, shapes: Sequence[Shape], mesh: Mesh, name: str) -> Shape:
    """Return the shape of a tensor of which the ranks of a mesh have these pieces."""
    if layout.ndim != len(shapes[0]):
        raise _unplanned_call(f"{name} of {counted(len(shapes[0]), 'dim')}")
    whole = tuple(
        sum(shapes[rank][dim] for rank in (mesh.groups(axes)[0] if axes else (0,)))
        for dim, axes in enumerate(layout.dims)
    )
    expected = [layout.local_shape(whole, mesh, rank) for rank in range(len(shapes))]
    is_small = any(mesh.degree(axes) > size for axes, size in zip(layout.dims, whole))
    if is_small or expected != [tuple(shape) for shape in shapes]:
        raise InvalidInput(
            "with local inputs each rank brings its slice, and slices are the pieces of one batch: "
            "of one size, rounded up, but for the last",
            got="\n".join(f"rank {r}: {name} {tuple(s)}" for r, s in enumerate(shapes)),
            remedy=f"slices as {layout} cuts {whole} on {mesh}: {', '.join(map(str, expected))}",
        )
    return whole


def _unplanned_call(got: str) -> InvalidInput:
    return InvalidInput(
        "with local inputs a call has the arguments of the one that was planned: their layouts say "
        "which slice a rank brings",
        got=got,
        remedy="parallelize again for this call, or hand over global batches",
    )
