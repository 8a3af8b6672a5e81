"""Gradient synchronisation of a pipeline: between the replicas of a stage, as soon as it can be.

A parameter belongs to the stages that read it (a tied one to several), and lies on every rank that
holds one of these in any pipe. Its gradient is complete on a rank when the last backward there of
those stages is done: then the sum with all other such ranks, and with the copies inside the stage,
starts and goes on beside the actions that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import joined_flat, split_like, wait_for
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.synchronization import last_backwards
from autopar.runtime.buckets import taken
from autopar.runtime.groups import Axes
from autopar.runtime.leaves import Leaves
from autopar.runtime.placing import in_own_memory
from autopar.runtime.world import world

Alike = tuple[tuple[int, ...], Axes, torch.dtype]


@dataclass
class Share:
    """Parameters that are complete at once and summed over the same ranks."""

    names: list[str]
    ready: int  # the action after which they are complete; -1: before the first
    group: dist.ProcessGroup | None  # None: this rank alone
    leaves: dict[str, Tensor] = field(default_factory=dict)  # those that learn in this step
    buffer: Tensor | None = None
    work: dist.Work | None = None


@dataclass(frozen=True)
class Learned:
    """A parameter that the loss gives a gradient."""

    name: str
    dtype: torch.dtype
    stages: tuple[int, ...]  # that read it
    sync: Axes  # inside a stage, over which its gradient is still to be summed

    @property
    def alike(self) -> Alike:
        """What parameters have in common that are summed at once."""
        return self.stages, self.sync, self.dtype


class StageSync:
    """Sums the gradients of one rank's stages."""

    def __init__(
        self, pipelining: Pipelining, parameters: Sequence[Learned], leaves: Leaves
    ) -> None:
        """`parameters`: all that the loss gives a gradient; `leaves`: this rank's pieces."""
        self._leaves = leaves
        schedule = pipelining.schedule
        place = pipelining.mesh.coordinate(dist.get_rank())[pipelining.axis]
        last, held = last_backwards(schedule)[place], schedule.held_by(place)
        groups = gradient_groups(pipelining, parameters)
        self.shares = []
        for (stages, sync, dtype), group in groups.items():
            holders = holders_of(pipelining, stages)
            names = [one.name for one in parameters if one.alike == (stages, sync, dtype)]
            if place in holders:
                done = [last.get((pipe, stage), -1) for pipe, stage in held if stage in stages]
                self.shares.append(Share(names, max(done), group))

    def start(self) -> None:
        """Before a step."""
        for share in self.shares:
            leaves = {name: self._leaves.by_name[name] for name in share.names}
            share.leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            share.work = share.buffer = None
            for leaf in leaves.values():
                leaf.grad = None
        self.after(-1)

    def after(self, position: int) -> None:
        """Start what is complete now that the action at `position` is done."""
        for share in self.shares:
            if share.ready != position or share.group is None or not share.leaves:
                continue
            grads = taken(share.leaves.values())
            share.buffer = joined_flat(grads if len(grads) > 1 else in_own_memory(grads))
            share.work = dist.all_reduce(share.buffer, group=share.group, async_op=True)

    def finish(self) -> dict[str, Tensor]:
        """Wait for all sums: the local gradient of each parameter."""
        found: dict[str, Tensor] = {}
        for share in self.shares:
            if share.work is None:
                found |= zip(share.leaves, in_own_memory(taken(share.leaves.values())))
                continue
            wait_for(share.work)
            assert share.buffer is not None
            pieces = split_like(share.buffer, list(share.leaves.values()))
            found |= zip(share.leaves, pieces)
            share.work = share.buffer = None
        return found


def gradient_groups(
    pipelining: Pipelining, parameters: Sequence[Learned]
) -> dict[Alike, dist.ProcessGroup | None]:
    """The group of each sum. Ranks may complete theirs in different orders: none shares a group."""
    return {
        alike: own_group(
            pipelining, holders_of(pipelining, alike[0]), alike[1], f"gradients {number}"
        )
        for number, alike in enumerate(dict.fromkeys(one.alike for one in parameters))
    }


def own_group(
    pipelining: Pipelining, places: Sequence[int], axes: Axes = (), purpose: str = ""
) -> dist.ProcessGroup | None:
    """The group of this rank over some places of the pipeline and over axes inside a stage.

    All ranks make all groups together: torch names a group after how many there are. None if this
    rank is in none, or alone.
    """
    mesh, axis = pipelining.mesh, pipelining.axis
    fixed = [name for name in mesh if name != axis and name not in axes]
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        if coordinate[axis] in places:
            members.setdefault(tuple(coordinate[name] for name in fixed), []).append(rank)
    own = None
    for ranks in members.values():
        if len(ranks) > 1:
            own = world().group_of(ranks, purpose=purpose) or own
    return own


def holders_of(pipelining: Pipelining, stages: Sequence[int]) -> tuple[int, ...]:
    """The places of the pipeline that hold one of `stages` in any pipe."""
    placement = pipelining.schedule.placement
    return tuple(sorted({ranks[stage] for ranks in placement for stage in stages}))
