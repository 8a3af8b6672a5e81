"""Ways: the copies that a step makes of a parameter, and which of them may come together.

    optimizer ──once a step──▶ storage ──for each use──▶ leaf

Plan and runtime read them from the same program. A leaf is what a rank reads: the working copy, or
what the gathers make of a parameter that all its readers share. Where these read another dtype than
that of the parameter, all copies have it: then there is one in its storage, even if it is kept
there.
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
    """From one place of a parameter to the next: a copy, which may be gathered."""

    fine: Layout
    coarse: Layout
    lasts: bool  # to the end of a step
    goes_up: bool  # from the host to the device
    on_host: bool  # the copy is there


@dataclass(frozen=True)
class CopiedParameter:
    """A parameter, and what is copied of it."""

    name: str  # in the model
    shape: tuple[int, ...]
    dtype: torch.dtype  # of its copies and the leaf
    is_cast: bool  # to that dtype
    places: ParameterPlacement
    taken: int  # of the gathers and casts behind the placeholder, by the runtime
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
        """What is copied to what: once a step, then for each use."""
        if not self.is_read:
            return ()
        at, found = self.places, []
        up, is_there = at.goes_up == ("optimizer", "storage"), "storage" in at.on_host
        if at.optimizer != at.storage or self.is_cast or up:
            found.append(ParameterCopy(at.optimizer, at.storage, True, up, is_there))
        up, is_there = at.goes_up == ("storage", "working"), "working" in at.on_host
        if at.storage != self.leaf or up:
            found.append(ParameterCopy(at.storage, self.leaf, False, up, is_there))
        return tuple(found)

    @property
    def summed(self) -> Layout:
        """Where the gradients of micro-batches add up."""
        at = self.places.gradient
        return at if self.leaf.cuts_into(at) else self.leaf

    def bytes(self, layout: Layout, mesh: Mesh) -> int:
        """Of the largest piece of a copy."""
        return torch.Size(layout.largest_shape(self.shape, mesh)).numel() * self.dtype.itemsize


def describe_copies(
    node: fx.Node, place: Mapping[fx.Node, int], mesh: Mesh, known: ParameterReaders | None
) -> CopiedParameter:
    """What a program copies of a parameter; `place` of all its nodes. `known`: who reads it, where
    the program is that of all stages of a pipeline."""
    places, type_ = info(node).places, info(node).type
    assert places is not None
    taken = taken_copies(node)
    end = taken[-1] if taken else node
    moved = [movement for one in taken if (movement := info(one).movement) is not None]
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
        len(taken),
        info(end).type.layout if end.users else places.optimizer,
        in_mesh_order({*info(node).sync, *gathered}, mesh),
        readers,
    )


def copied_parameters(
    nodes: Iterable[fx.Node], mesh: Mesh, readers: Mapping[fx.Node, ParameterReaders] = NO_READERS
) -> dict[fx.Node, CopiedParameter]:
    """The same of all parameters among some nodes of one program. `readers`: of a program of all
    stages of a pipeline; a stage itself says who else reads its parameters."""
    parameters = [node for node in nodes if info(node).places is not None]
    if not parameters:
        return {}
    are_known = all(node in readers or info(node).readers is not None for node in parameters)
    every = () if are_known else parameters[0].graph.nodes
    place = {node: at for at, node in enumerate(every)}
    return {node: describe_copies(node, place, mesh, readers.get(node)) for node in parameters}


class CopyGroupKey(NamedTuple):
    """What copies have in common that come together."""

    is_last: bool  # of the ways of a parameter: these copies are leaves
    lasts: bool  # to the end of a step
    axes: tuple[str, ...]  # over which they are gathered
    goes_up: bool  # from the host to the device
    on_host: bool  # these copies are there
    dtype: torch.dtype
    stages: tuple[int, ...]  # that read them: the ranks of these have them all

    def way(self, parameter: CopiedParameter) -> ParameterCopy:
        return parameter.copied[-1 if self.is_last else 0]

    def bytes(self, parameters: Iterable[CopiedParameter], mesh: Mesh) -> int:
        """Of the largest pieces."""
        return sum(one.bytes(self.way(one).coarse, mesh) for one in parameters)


SomeCopied = TypeVar("SomeCopied", bound=CopiedParameter)


@dataclass(frozen=True)
class CopyGroup(Generic[SomeCopied]):
    """Parameters whose copies come together, from one layout, or dtype, of each to another."""

    kind: CopyGroupKey
    parameters: tuple[SomeCopied, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters)

    def bytes(self, mesh: Mesh) -> int:
        """Of the largest pieces."""
        return self.kind.bytes(self.parameters, mesh)


def copy_groups(
    parameters: Iterable[SomeCopied], mesh: Mesh, buffer_bytes: int
) -> list[CopyGroup[SomeCopied]]:
    """The copies of some parameters, all of those that the same stages read."""
    kinds: dict[CopyGroupKey, list[SomeCopied]] = {}
    for one in parameters:
        for way in one.copied:
            axes = in_mesh_order({*way.fine.axes} - {*way.coarse.axes}, mesh)
            about = axes, way.goes_up, way.on_host, one.dtype, one.readers.stages
            kinds.setdefault(CopyGroupKey(way == one.copied[-1], way.lasts, *about), []).append(one)
    found = []
    for kind, those in kinds.items():
        sizes = {one.name: kind.bytes([one], mesh) for one in those}  # groups ask again and again

        def size(one: SomeCopied, sizes: Mapping[str, int] = sizes) -> int:
            return sizes[one.name]

        found += [
            CopyGroup(kind, tuple(group)) for group in gather_groups(those, size, buffer_bytes)
        ]
    return found


def in_mesh_order(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """Axes as they stand in the mesh: so do the members of a group."""
    wanted = set(axes)
    return tuple(axis for axis in mesh if axis in wanted)


def copy_groups_of_nodes(
    nodes: Iterable[fx.Node],
    mesh: Mesh,
    buffer_bytes: int,
    readers: Mapping[fx.Node, ParameterReaders] = NO_READERS,
) -> list[CopyGroup[CopiedParameter]]:
    """The same of the parameters among some nodes of one program."""
    return copy_groups(copied_parameters(nodes, mesh, readers).values(), mesh, buffer_bytes)


def live_copy_bytes(groups: Iterable[CopyGroup], mesh: Mesh) -> float:
    """Of the copies of parameters that come for each use: two groups live."""
    sizes = [float(group.bytes(mesh)) for group in groups if not group.kind.lasts]
    return min(sum(sizes), LIVE_GROUPS * max(sizes, default=0.0))


def largest_group_bytes(groups: Iterable[CopyGroup], stages: tuple[int, ...], mesh: Mesh) -> int:
    """Bytes of the largest group of copies, that live a use or a step, which these stages read."""
    there = (group.bytes(mesh) for group in groups if group.kind.stages == stages)
    return max(there, default=0)
