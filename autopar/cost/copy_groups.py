"""Copies of parameters that a step makes, and which of them are gathered together.

    optimizer ──once a step──▶ storage ──for each use──▶ leaf

Plan and runtime read them from the same program. A leaf is the tensor that a rank reads: the
working copy, or the result of the gathers that all readers of a parameter share. Where readers need
another dtype, all copies have it, and there is a copy even where storage and optimizer lie
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import fx

from autopar.capture.origins import taken_copies
from autopar.cost.gather_groups import LIVE_GROUPS, gather_groups
from autopar.layout import Layout, ParameterPlacement
from autopar.mesh import Mesh
from autopar.strategies.node_info import ParameterReaders, info

NO_READERS: Mapping[fx.Node, ParameterReaders] = MappingProxyType({})


@dataclass(frozen=True)
class ParameterCopy:
    """A copy of a parameter from one place to the next: gathered, or a slice of a coarser one."""

    source: Layout
    target: Layout
    is_step_long: bool  # to the end of a step
    from_host: bool  # from the host to the device
    on_host: bool  # the copy is there


@dataclass(frozen=True)
class CopiedParameter:
    """A parameter with the copies that a step makes of it."""

    name: str  # in the model
    shape: tuple[int, ...]
    dtype: torch.dtype  # of its copies and the leaf
    is_cast: bool  # to that dtype
    places: ParameterPlacement
    runtime_copies: int  # gathers and casts behind the placeholder that the runtime does
    leaf: Layout
    pending: tuple[str, ...]  # over which the leaf's gradient is a partial sum
    readers: ParameterReaders

    @property
    def first(self) -> int:
        return self.readers.first

    @property
    def last(self) -> int:
        return self.readers.last

    @property
    def is_read(self) -> bool:
        return self.first >= 0

    @cached_property
    def copied(self) -> tuple[ParameterCopy, ...]:
        """Return the copies: first the one made once a step, then the one for each use."""
        if not self.is_read:
            return ()
        at, copies = self.places, []
        up, is_host_copy = at.goes_up == ("optimizer", "storage"), "storage" in at.on_host
        if at.optimizer != at.storage or self.is_cast or up:
            copies.append(ParameterCopy(at.optimizer, at.storage, True, up, is_host_copy))
        up, is_host_copy = at.goes_up == ("storage", "working"), "working" in at.on_host
        if at.storage != self.leaf or up:
            copies.append(ParameterCopy(at.storage, self.leaf, False, up, is_host_copy))
        return tuple(copies)

    @property
    def summed(self) -> Layout:
        """Return the layout in which the gradients of micro-batches add up."""
        at = self.places.gradient
        return at if self.leaf.cuts_into(at) else self.leaf

    def bytes(self, layout: Layout, mesh: Mesh) -> int:
        """Return the bytes of the largest piece of a copy with this layout."""
        return torch.Size(layout.largest_shape(self.shape, mesh)).numel() * self.dtype.itemsize


def describe_copies(
    node: fx.Node, place: Mapping[fx.Node, int], mesh: Mesh, known: ParameterReaders | None
) -> CopiedParameter:
    """Return a parameter with its copies; `place` numbers all nodes of the program. `known`: its
    readers over all stages of a pipeline; None: those of this program."""
    places, type_ = info(node).places, info(node).type
    assert places is not None
    gathers = taken_copies(node)
    end = gathers[-1] if gathers else node
    moved = [movement for gather in gathers if (movement := info(gather).movement) is not None]
    gathered = {axis for movement in moved for axis in movement.axes}
    dtype, readers = info(end).type.dtype, known or info(node).readers
    if readers is None:
        reading = [place[user] for user in end.users]
        readers = ParameterReaders((0,), (0,), min(reading, default=-1), max(reading, default=-1))
    return CopiedParameter(
        info(node).origin[1],
        type_.shape,
        dtype,
        dtype != type_.dtype,
        places,
        len(gathers),
        info(end).type.layout if end.users else places.optimizer,
        in_mesh_order({*info(node).sync, *gathered}, mesh),
        readers,
    )


def late_sum_axes(parameter: fx.Node) -> tuple[str, ...]:
    """Return the axes over which a parameter's gradient is a partial sum when it was scattered to
    where it adds up: also those that storage is cut over further than that."""
    places, sync = info(parameter).places, info(parameter).sync
    assert places is not None
    scattered = {*places.working.axes, *places.scattered_axes}
    late = [axis for axis in places.storage.axes if axis not in scattered]
    moved = [info(copy).movement for copy in taken_copies(parameter)] if late else []
    summed = {axis for move in moved if move is not None and move.pending for axis in move.axes}
    return (*sync, *(axis for axis in late if axis in summed))


def copied_parameters(
    nodes: Iterable[fx.Node], mesh: Mesh, readers: Mapping[fx.Node, ParameterReaders] = NO_READERS
) -> dict[fx.Node, CopiedParameter]:
    """Return the parameters among some nodes of one program, with their copies. `readers`: for a
    program of all stages of a pipeline; a stage itself records who else reads its parameters."""
    parameters = [node for node in nodes if info(node).places is not None]
    if not parameters:
        return {}
    are_known = all(node in readers or info(node).readers is not None for node in parameters)
    every = () if are_known else parameters[0].graph.nodes
    place = {node: at for at, node in enumerate(every)}
    return {node: describe_copies(node, place, mesh, readers.get(node)) for node in parameters}


class CopyGroupKey(NamedTuple):
    """The facts that copies share which are gathered together."""

    is_leaf: bool  # these copies are leaves, the last of a parameter
    is_step_long: bool  # to the end of a step
    axes: tuple[str, ...]  # over which they are gathered
    from_host: bool  # from the host to the device
    on_host: bool  # these copies are there
    dtype: torch.dtype
    stages: tuple[int, ...]  # that read them: the ranks of these have them all

    def way(self, parameter: CopiedParameter) -> ParameterCopy:
        return parameter.copied[-1 if self.is_leaf else 0]

    def bytes(self, parameters: Iterable[CopiedParameter], mesh: Mesh) -> int:
        """Return the bytes of the largest pieces of these parameters' copies."""
        return sum(parameter.bytes(self.way(parameter).target, mesh) for parameter in parameters)


SomeCopied = TypeVar("SomeCopied", bound=CopiedParameter)


@dataclass(frozen=True)
class CopyGroup(Generic[SomeCopied]):
    """Parameters whose copies come together, each from one layout or dtype to another."""

    kind: CopyGroupKey
    parameters: tuple[SomeCopied, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    def bytes(self, mesh: Mesh) -> int:
        """Return the bytes of the largest pieces of all copies."""
        return self.kind.bytes(self.parameters, mesh)


def copy_groups(
    parameters: Iterable[SomeCopied], mesh: Mesh, buffer_bytes: int
) -> list[CopyGroup[SomeCopied]]:
    """Return the copies of some parameters in groups, each read by the same stages."""
    kinds: dict[CopyGroupKey, list[SomeCopied]] = {}
    for parameter in parameters:
        for copy in parameter.copied:
            axes = in_mesh_order({*copy.source.axes} - {*copy.target.axes}, mesh)
            is_leaf = copy == parameter.copied[-1]
            stages, dtype = parameter.readers.stages, parameter.dtype
            key = CopyGroupKey(
                is_leaf, copy.is_step_long, axes, copy.from_host, copy.on_host, dtype, stages
            )
            kinds.setdefault(key, []).append(parameter)
    groups = []
    for kind, members in kinds.items():
        sizes = {
            parameter.name: kind.bytes([parameter], mesh) for parameter in members
        }  # groups ask again and again

        def size(parameter: SomeCopied, sizes: Mapping[str, int] = sizes) -> int:
            return sizes[parameter.name]

        gathered = gather_groups(members, size, buffer_bytes, is_step_long=kind.is_step_long)
        groups += [CopyGroup(kind, tuple(group)) for group in gathered]
    return groups


def in_mesh_order(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """Return axes in the order of the mesh, which is that of the members of a group."""
    wanted = set(axes)
    return tuple(axis for axis in mesh if axis in wanted)


def copy_groups_of_nodes(
    nodes: Iterable[fx.Node],
    mesh: Mesh,
    buffer_bytes: int,
    readers: Mapping[fx.Node, ParameterReaders] = NO_READERS,
) -> list[CopyGroup[CopiedParameter]]:
    """Return the copy groups of the parameters among some nodes of one program."""
    return copy_groups(copied_parameters(nodes, mesh, readers).values(), mesh, buffer_bytes)


def live_copy_bytes(groups: Iterable[CopyGroup], mesh: Mesh) -> float:
    """Return the bytes of copies made for each use: two groups are alive at a time."""
    sizes = [float(group.bytes(mesh)) for group in groups if not group.kind.is_step_long]
    return min(sum(sizes), LIVE_GROUPS * max(sizes, default=0.0))


def largest_group_bytes(groups: Iterable[CopyGroup], stages: tuple[int, ...], mesh: Mesh) -> int:
    """Return the bytes of the largest group of copies that exactly these stages read."""
    sizes = (group.bytes(mesh) for group in groups if group.kind.stages == stages)
    return max(sizes, default=0)
