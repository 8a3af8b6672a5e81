"""Kernels: operators whose cut needs another local function get it.

Runs after `assign_types`, before `insert_movements`. A function that depends on where a rank's
piece starts has `START` among its arguments and its call in `start_of`; `local_call` puts the
number in. A loss over cut classes becomes three nodes, its small all-gather visible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.collectives import Movement
from autopar.collectives.joint_kernels import (
    Driver,
    drive_without_messages,
    run_joint_kernel,
)
from autopar.collectives.joint_messages import drive_on_process
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.passes.insert_movements import insert_movement
from autopar.passes.pass_context import RewriteContext
from autopar.strategies import (
    Expansion,
    KernelCall,
    joint_arguments,
    piece_call,
    placed_arguments,
    tensor_inputs,
)
from autopar.strategies.node_info import info, name_beside
from autopar.tensor_type import TensorType


class _Start:
    """Stand for the start of a rank's piece until the rank is known."""

    def __repr__(self) -> str:
        return "start"


START = _Start()


def swap_kernels(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Give every operator the function that works on its pieces."""
    for node in list(graph.nodes):
        rule, strategy = info(node).rule, info(node).strategy
        if rule is None or strategy is None or (call := KernelCall.of(rule, strategy)) is None:
            continue
        kernel = call.kernel
        if kernel.joint is not None:
            node.kwargs, node.args = joint_arguments(node, info(node).type, context.mesh), ()
            node.target, info(node).joint = kernel.function, call
            continue
        info(node).start_of = call
        if kernel.expand is not None:
            _expand(graph, node, call, kernel.expand, context.mesh)
        else:
            node.target = kernel.function
            node.kwargs = {**node.kwargs, "start": START}
    return graph


def local_call(
    node: fx.Node, mesh: Mesh, rank: int, device: torch.device
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """Return function, arguments and keywords that `rank` calls on `device`; tensors are nodes."""
    known = info(node)
    if known.joint is not None:
        return (
            joint_call(node, mesh, rank, drive_without_messages),
            (),
            arguments_of(node, mesh, rank),
        )
    if known.start_of is None:
        function, args, kwargs = piece_call(
            node, known.rule, known.strategy, types=known.type, mesh=mesh, rank=rank
        )
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu") if known.on_host else device
        return function, args, kwargs
    start = known.start_of.start(mesh, rank)
    args = tuple(start if argument is START else argument for argument in node.args)
    kwargs = {k: start if argument is START else argument for k, argument in node.kwargs.items()}
    assert callable(node.target)
    return node.target, args, kwargs


def joint_call(
    node: fx.Node, mesh: Mesh, rank: int, drive: Driver | None = None, name: str = ""
) -> Callable[..., Any]:
    """Return the function by which `rank` takes part in a joint kernel.
    It uses the process group called `name`, or another `drive`."""
    call = info(node).joint
    assert call is not None
    kernel, group = call.joint, call.group(mesh, rank)
    driven = drive_on_process(name, group) if drive is None else drive
    has_one_output = len(info(node).types) == 1

    def run_joint(**arguments: Any) -> Any:
        (outputs,) = run_joint_kernel(kernel, [group], driven, [arguments])
        return outputs[0] if has_one_output else outputs

    run_joint.__name__ = kernel.forward.__name__
    return run_joint


def arguments_of(node: fx.Node, mesh: Mesh, rank: int) -> dict[str, Any]:
    """Return the keywords with which `rank` calls its part of a joint kernel."""
    call = info(node).joint
    assert call is not None
    return placed_arguments(node.kwargs, call.rule, call.strategy, mesh, rank)


def _expand(
    graph: fx.Graph, node: fx.Node, call: KernelCall, expansion: Expansion, mesh: Mesh
) -> None:
    """Replace `node` by its part on each rank, an all-gather, and their combination."""
    axes = call.axes
    parts, previous = mesh.degree(axes), info(node).type
    dtype = torch.promote_types(previous.dtype, torch.float32)
    args, kwargs = expansion.part_call(
        tuple(node.args), dict(node.kwargs), START, call.rule.sizes[call.name]
    )
    with graph.inserting_before(node):
        name, place = name_beside(node, "part")
        part = graph.create_node("call_function", expansion.part, args, kwargs, name)
        shape = (*previous.shape, expansion.columns * parts)
        cut = Layout(*previous.layout.dims, axes)
        part.meta = dict(node.meta)
        info(part).update(
            type=TensorType(shape, dtype, cut),
            val=info(node).val.new_empty(shape, dtype=dtype),
            saved=(0, 1),
            saves_output=True,
            block=place,
        )
        gathered = part
        for axis in reversed(axes):
            movement = Movement("all_gather", (axis,), dim=len(previous.shape))
            gathered = insert_movement(graph, gathered, movement, node)
    inputs, wants = tensor_inputs(node), info(node).wants
    wanted = {value: Placement(want.layout) for value, want in zip(inputs, wants)}
    wanted[gathered] = Placement(info(gathered).type.layout)
    node.target = expansion.combine
    node.args, node.kwargs = expansion.combine_call(
        gathered, tuple(node.args), dict(node.kwargs), parts, previous.dtype
    )
    # The part has its calls and its start.
    info(node).update(rule=None, saved=(0, 1), calls=(), start_of=None)
    info(node).wants = tuple(wanted[value] for value in node.all_input_nodes)
