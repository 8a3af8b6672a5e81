"""Which ranks hold which stages, and over which of them gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from autopar.passes.localize import Axes
from autopar.pipeline.synchronization import last_backwards
from autopar.plan.program import Program
from autopar.runtime.buckets import Summed
from autopar.runtime.groups import Groups
from autopar.runtime.world import world
from autopar.strategies.node_info import info

SumKey = tuple[
    tuple[int, ...], Axes
]  # the stages that read a parameter; the axes of its sum inside


class StageRanks:
    """Where this rank stands, and who holds which stages. Without a pipeline there is one place."""

    def __init__(self, program: Program, rank: int) -> None:
        pipelining, self.mesh = program.pipelining, program.whole_mesh
        self.schedule = program.schedule
        self.axes: Axes = () if pipelining is None else (pipelining.axis,)
        # The ranks that stand alike in every place of the pipeline; those at each place.
        self.lines = self.mesh.groups(self.axes)
        self.meshes = list(zip(*self.lines))
        self.place = next(at for at, ranks in enumerate(self.meshes) if rank in ranks)
        self.inner = self.meshes[self.place].index(rank)
        self.line = self.lines[self.inner]

    def of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The places of the pipeline that hold one of `stages` in any pipe."""
        placement = self.schedule.placement
        return tuple(sorted({ranks[stage] for ranks in placement for stage in stages}))

    def group(
        self, places: Sequence[int], axes: Axes = (), purpose: str = ""
    ) -> dist.ProcessGroup | None:
        """The group of this rank over some places of the pipeline and over axes inside a stage.

        All ranks make all groups together: torch names a group after how many there are. None if
        this rank is in none, or alone.
        """
        own, there = None, {rank for place in places for rank in self.meshes[place]}
        for ranks in self.mesh.groups((*self.axes, *axes)):
            members = [rank for rank in ranks if rank in there]
            if len(members) > 1:
                own = world().group_of(members, purpose=purpose) or own
        return own


class Users:
    """The stages that read each parameter and buffer."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._stages: dict[str, list[int]] = {}
        for stage in program.stages:
            for name in [*stage.holds("parameter"), *stage.holds("buffer")]:
                self._stages.setdefault(name, []).append(stage.index)

    def stages(self, name: str) -> tuple[int, ...]:
        """What nobody reads lies with the first stage."""
        return tuple(self._stages.get(name, (0,)))

    def key(self, placeholder: str) -> SumKey:
        """What a parameter has in common with those that are summed over the same ranks."""
        name = self._program.captured.parameters[placeholder]
        return self.stages(name), info(self._program.placeholders[placeholder]).sync


def gradient_sums(
    program: Program, users: Users, ranks: StageRanks, groups: Groups
) -> dict[SumKey, Summed]:
    """The sums that this rank has a part in.

    Ranks of several places may complete theirs in different orders, so these share no group.
    """
    schedule, place = program.schedule, ranks.place
    last, order = last_backwards(schedule)[place], schedule.orders[place]
    local = schedule.local_stages(place)
    learned = frozenset().union(*program.learned)
    parameters = [key for key, name in program.captured.parameters.items() if name in learned]
    sums, keys = {}, dict.fromkeys(map(users.key, parameters))
    for number, (stages, axes) in enumerate(keys):
        places = ranks.of(stages)
        if len(places) > 1:
            group = ranks.group(places, axes, f"gradients {number}")
        else:
            group = groups[axes] if axes else None
        if group is not None and place in places:
            ready = max(last.get(pair, -1) for pair in local if pair[1] in stages)
            is_one = ready >= 0 and len(order[ready].microbatches) == 1
            sums[stages, axes] = Summed(
                group, ready, is_one and schedule.split_stages.isdisjoint(stages)
            )
    return sums
