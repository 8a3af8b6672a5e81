"""Localize: the program of all ranks becomes the program of one rank, ready to run.

Runs between `PASSES` and `LOCAL_PASSES`: sizes become local, movements get their process group and
this rank's index in it, functions that depend on where a piece starts get its offset.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autopar.collectives import operator_call
from autopar.mesh import Mesh
from autopar.passes.flow import copy_subgraph
from autopar.passes.kernels import arguments_of, joint_call, local_call
from autopar.strategies.node_info import info

Axes = tuple[str, ...]
GroupName = Callable[[Axes], str]


def localize(
    graph: fx.Graph, mesh: Mesh, rank: int, device: torch.device, group_name: GroupName
) -> fx.Graph:
    """Return a copy of `graph` for `rank`; `group_name` names its process group over axes."""
    local = copy_subgraph(graph, graph.nodes)
    for node in local.nodes:
        if (movement := info(node).movement) is not None:
            (value,) = node.all_input_nodes
            type_ = info(value).type
            node.target, arguments = operator_call(
                movement, type_.layout, type_.shape, mesh, rank, group_name(movement.axes)
            )
            node.args = (value, *arguments)
        elif (joint := info(node).joint) is not None:
            keywords = arguments_of(node, mesh, rank)
            node.target = joint_call(node, mesh, rank, name=group_name(joint.axes))
            node.kwargs = keywords
        elif node.op == "call_function":
            node.target, node.args, node.kwargs = local_call(node, mesh, rank, device)
    local.lint()
    return local


def axes_used(graph: fx.Graph) -> set[Axes]:
    """Return the sets of axes over which a program moves data."""
    used: set[Axes] = set()
    for node in graph.nodes:
        if (movement := info(node).movement) is not None:
            used.add(movement.axes)
        if (joint := info(node).joint) is not None:
            used.add(joint.axes)
        if info(node).sync:
            used.add(info(node).sync)
        used |= {axes for axes in info(node).away.values() if axes}
        if node.op == "placeholder":
            used |= {(axis,) for axis in info(node).type.layout.axes}
    return used
