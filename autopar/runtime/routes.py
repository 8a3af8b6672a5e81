"""Routes: from where a parameter is kept to what readers start from, and its gradient's way back.

    optimizer ──once a step──▶ storage ──for each use──▶ leaf        groups of copies
    optimizer ◀──at the end── gradient ◀──each backward── leaf       buckets of gradients

A leaf is what a rank's program reads: the working copy, or what the gathers make of a parameter
that all its readers share. Neighbours travel in one group (`cost/groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopar.errors import InvalidInput
from autopar.layout import Layout, ParameterPlacement
from autopar.mesh import Mesh
from autopar.passes.gradient_sync import gathers_behind
from autopar.passes.localize import Axes
from autopar.plan.program import Program
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class Route:
    """Of one parameter."""

    name: str  # in the model
    placeholder: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: ParameterPlacement
    gathers: int  # behind the placeholder, that the runtime does
    leaf: Layout
    pending: Axes  # over which the leaf's gradient is a partial sum
    first: int  # the place of its first reader in the program, and of its last; -1: none
    last: int

    @property
    def is_read(self) -> bool:
        return self.first >= 0

    @property
    def copied(self) -> tuple[tuple[Layout, Layout], ...]:
        """What is gathered to what: once a step, then for each use."""
        if not self.is_read:
            return ()
        ways = (self.places.optimizer, self.places.storage), (self.places.storage, self.leaf)
        return tuple((fine, coarse) for fine, coarse in ways if fine != coarse)

    @property
    def summed(self) -> Layout:
        """Where the gradients of micro-batches add up."""
        at = self.places.gradient
        return at if self.leaf.cuts_into(at) else self.leaf


def routes_of(program: Program) -> dict[str, Route]:
    """Of all parameters of a program, by name."""
    place = {node: at for at, node in enumerate(program.graph.nodes)}
    learned = frozenset().union(*program.learned)
    found = {}
    for placeholder, name in program.captured.parameters.items():
        node = program.placeholders[placeholder]
        places, type_ = info(node).places, info(node).type
        assert places is not None
        gathers = gathers_behind(node)
        count = 0
        for gather in gathers:
            movement, after = info(gather).movement, info(gather).type.layout
            assert movement is not None
            is_summed = movement.pending or not info(node).differentiable
            if not is_summed or not after.cuts_into(places.optimizer):
                break
            count += 1
        taken, end = gathers[:count], gathers[count - 1] if count else node
        gathered = {axis for one in taken for axis in info(one).movement.axes}  # type: ignore[union-attr]
        readers = [place[user] for user in end.users]
        route = found[name] = Route(
            name,
            placeholder,
            type_.shape,
            type_.dtype,
            places,
            count,
            info(end).type.layout if readers else places.optimizer,
            in_order({*info(node).sync, *gathered}, program.mesh),
            min(readers, default=-1),
            max(readers, default=-1),
        )
        if name in learned:
            _require_summed(route)
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
