"""Which ranks hold which stages, and over which of them gradients are summed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from autopar.cost.copy_groups import in_mesh_order
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.pipeline.schedule import Schedule
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.host_copies import HostLink
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.backends.world import world
from autopar.runtime.parameters.flat_buffers import TensorPieces
from autopar.runtime.parameters.gradient_buckets import BucketEntry, ReductionSpec
from autopar.runtime.parameters.local_parameters import LocalParameters
from autopar.runtime.parameters.parameter_movement import ParameterMovement


@dataclass(frozen=True)
class SumKey:
    """What parameters have in common whose gradients are summed over the same ranks."""

    stages: tuple[int, ...]  # that read them
    each: Axes  # over which the gradient of a micro-batch is summed and cut
    last: Axes  # over which what has added up is summed and cut
    whole: Axes  # over which the rest is summed
    adds: bool = False  # those of micro-batches add up outside of the leaf, in another dtype
    goes_down: bool = False  # to the host, where the parameter is
    on_host: bool = False  # made there, and summed there


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
        return self.schedule.holders(stages)

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

    def key(self, route: ParameterMovement) -> SumKey:
        """What a parameter has in common with those that are summed over the same ranks."""
        mesh, kept = self._program.mesh, {*route.places.optimizer.axes}
        each = in_mesh_order({*route.summed.axes} - {*route.leaf.axes}, mesh)
        last = in_mesh_order(kept - {*route.summed.axes}, mesh)
        whole = in_mesh_order({*route.pending} - kept, mesh)
        adds = route.dtype != route.reduce and not each
        goes_down = route.places.goes_up is not None
        is_there = "gradient" in route.places.on_host
        return SumKey(route.readers.stages, each, last, whole, adds, goes_down, is_there)


def bucket_entry(
    route: ParameterMovement, key: SumKey, leaves: LocalParameters, mesh: Mesh, rank: int
) -> BucketEntry:
    """How the gradient of a parameter that lies here goes back to where it is kept."""

    def pieces(coarse: Layout, fine: Layout, axes: Axes) -> TensorPieces | None:
        if not axes:
            return None
        return TensorPieces.between(coarse, fine, route.shape, mesh=mesh, rank=rank, axes=axes)

    return BucketEntry(
        route.name,
        leaves.by_name[route.name],
        leaves.parameters[route.name],
        math.prod(route.leaf.largest_shape(route.shape, mesh)) * route.dtype.itemsize,
        pieces(route.leaf, route.summed, key.each),
        pieces(route.summed, route.places.optimizer, key.last),
        route.reduce,
    )


def gradient_sums(
    program: Program,
    users: Users,
    ranks: StageRanks,
    routes: Mapping[str, ParameterMovement],
    groups: Groups,
    link: HostLink | None = None,
) -> dict[SumKey, ReductionSpec]:
    """The sums that this rank has a part in; `link` takes those to the host that belong there.

    Ranks of several places may complete theirs in different orders, so these share no group.
    """
    place, learned = ranks.place, frozenset().union(*program.learned)
    keys = dict.fromkeys(users.key(route) for route in routes.values() if route.name in learned)
    wanted = {axes for key in keys for axes in (key.each, key.last) if axes}
    scattering = Groups(program.mesh, wanted, ranks.meshes, "gradients")
    sums = {}
    for number, key in enumerate(keys):
        places = ranks.of(key.stages)
        if len(places) > 1:
            group = ranks.group(places, key.whole, f"gradients {number}")
        else:
            group = groups[key.whole] if key.whole else None
        is_work = group or key.each or key.last or key.adds or key.goes_down
        if place in places and is_work:
            sums[key] = ReductionSpec(
                all_reduce_group=group,
                backward_group=scattering[key.each] if key.each else None,
                step_group=scattering[key.last] if key.last else None,
                ends=_ends(program.schedule, place, key.stages),
                is_accumulated=key.adds,
                link=link if key.goes_down else None,
            )
    return sums


def _ends(schedule: Schedule, place: int, stages: Sequence[int]) -> dict[int, bool]:
    """The actions after which gradients of some stages are complete, as far as they go; and
    whether each is one backward pass, which makes each gradient once."""
    is_split = not schedule.split_stages.isdisjoint(stages)
    return {
        at: len(schedule.orders[place][at].microbatches) == 1 and not is_split
        for stage in stages
        for at in schedule.gradient_positions[place].get(stage, ())
    }
