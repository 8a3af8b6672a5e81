"""Routes: from where a parameter is kept to what readers start from, and its gradient's way back.

    optimizer ──once a step──▶ storage ──for each use──▶ leaf        groups of copies
    optimizer ◀──at the end── gradient ◀──each backward── leaf       buckets of gradients

A leaf is what a rank's program reads: the working copy, or what the gathers make of a parameter
that all its readers share. Where these read another dtype than that of the parameter, all copies
have it: then there is one in its storage, even if it is kept there. Neighbours travel in one group
(`cost/groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import InvalidInput
from autopar.layout import Layout, ParameterPlacement
from autopar.mesh import Mesh
from autopar.passes.gradient_sync import copies_behind
from autopar.passes.localize import Axes
from autopar.plan.program import Program
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class Way:
    """From one place of a parameter to the next: a copy, which may be gathered."""

    fine: Layout
    coarse: Layout
    lasts: bool  # to the end of a step
    goes_up: bool  # from the host to the device
    on_host: bool  # the copy is there


@dataclass(frozen=True)
class Route:
    """Of one parameter."""

    name: str  # in the model
    placeholder: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # of its copies and the leaf
    is_cast: bool  # to that dtype
    reduce: torch.dtype  # in which gradients add up
    places: ParameterPlacement
    taken: int  # of the gathers and casts behind the placeholder, by the runtime
    leaf: Layout
    pending: Axes  # over which the leaf's gradient is a partial sum
    first: int  # the place of its first reader in the program, and of its last; -1: none
    last: int

    @property
    def is_read(self) -> bool:
        return self.first >= 0

    @property
    def copied(self) -> tuple[Way, ...]:
        """What is copied to what: once a step, then for each use."""
        if not self.is_read:
            return ()
        at, found = self.places, []
        up, is_there = at.goes_up == ("optimizer", "storage"), "storage" in at.on_host
        if at.optimizer != at.storage or self.is_cast or up:
            found.append(Way(at.optimizer, at.storage, True, up, is_there))
        up, is_there = at.goes_up == ("storage", "working"), "working" in at.on_host
        if at.storage != self.leaf or up:
            found.append(Way(at.storage, self.leaf, False, up, is_there))
        return tuple(found)

    @property
    def summed(self) -> Layout:
        """Where the gradients of micro-batches add up."""
        at = self.places.gradient
        return at if self.leaf.cuts_into(at) else self.leaf


def routes_of(program: Program) -> dict[str, Route]:
    """Of all parameters of a program, by name."""
    place = {node: at for at, node in enumerate(program.graph.nodes)}
    learned = frozenset().union(*program.learned)
    precision = program.captured.example.precision
    found = {}
    for placeholder, name in program.captured.parameters.items():
        node = program.placeholders[placeholder]
        places, type_ = info(node).places, info(node).type
        assert places is not None
        taken = _taken(node, places)
        end = taken[-1] if taken else node
        moved = [movement for one in taken if (movement := info(one).movement) is not None]
        gathered = {axis for movement in moved for axis in movement.axes}
        readers, dtype = [place[user] for user in end.users], info(end).type.dtype
        is_reduced = precision is not None and dtype.is_floating_point
        route = found[name] = Route(
            name,
            placeholder,
            type_.shape,
            dtype,
            dtype != type_.dtype,
            precision.reduce if precision is not None and is_reduced else dtype,
            places,
            len(taken),
            info(end).type.layout if readers else places.optimizer,
            in_order({*info(node).sync, *gathered}, program.mesh),
            min(readers, default=-1),
            max(readers, default=-1),
        )
        if name in learned:
            _require_summed(route)
    return found


def _taken(node: fx.Node, places: ParameterPlacement) -> list[fx.Node]:
    """Of the gathers and casts behind a parameter, those that the runtime does."""
    found = []
    for copy in copies_behind(node):
        movement, after = info(copy).movement, info(copy).type.layout
        is_summed = movement is None or movement.pending or not info(node).differentiable
        if not is_summed or not after.cuts_into(places.optimizer):
            break
        found.append(copy)
    return found


def in_order(axes: Iterable[str], mesh: Mesh) -> Axes:
    """Axes as they stand in the mesh: so do the members of a group."""
    wanted = set(axes)
    return tuple(axis for axis in mesh if axis in wanted)


def _require_summed(route: Route) -> None:
    cut = set(route.places.optimizer.axes) - set(route.leaf.axes)
    if not cut <= set(route.pending):
        raise InvalidInput(
            "the states of a parameter are cut over axes over which its gradient is summed",
            got=f"{route.name}: {route.places.optimizer} for gradients over "
            f"{', '.join(route.pending) or 'no axis'}",
            remedy="plan again",
        )
