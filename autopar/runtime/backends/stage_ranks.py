"""Find the ranks that hold a stage, and the groups that sum each parameter's gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from autopar.cost.copy_groups import in_mesh_order
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.pipeline.schedule import KINDS, Schedule
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.host_copies import HostLink
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.backends.world import world
from autopar.runtime.parameters.flat_buffers import TensorPieces
from autopar.runtime.parameters.gradient_buckets import BucketEntry
from autopar.runtime.parameters.local_parameters import LocalParameters
from autopar.runtime.parameters.parameter_movement import ParameterMovement
from autopar.runtime.parameters.reduction_spec import ReductionSpec


@dataclass(frozen=True)
class SumKey:
    """The common key of parameters whose gradients are summed over the same ranks."""

    stages: tuple[int, ...]  # that read the parameters
    backward_axes: Axes  # over which the gradient of a micro-batch is reduced and scattered
    step_axes: Axes  # over which the accumulated gradient is reduced and scattered
    all_reduce_axes: Axes  # over which the gradient is all-reduced
    is_accumulated: bool = False  # micro-batches add up outside of the leaf, in another dtype
    sums_to_host: bool = False  # the device computes the sum, which moves to the host
    on_host: bool = False  # the host computes the gradient and its sum


class StageRanks:
    """The place of this rank along the pipeline, and the ranks that hold each stage.

    Without a pipeline there is one place, 0.
    """

    def __init__(self, program: RuntimeProgram, rank: int) -> None:
        pipelining, self.mesh = program.pipelining, program.whole_mesh
        self.schedule = program.schedule
        self.axes: Axes = () if pipelining is None else (pipelining.axis,)
        # A line has the counterparts of one rank at all places; a mesh, the ranks of one place.
        self.lines = self.mesh.groups(self.axes)
        self.meshes = list(zip(*self.lines))
        self.place = next(at for at, ranks in enumerate(self.meshes) if rank in ranks)
        self.rank_in_stage = self.meshes[self.place].index(rank)
        self.line = self.lines[self.rank_in_stage]

    @cached_property
    def loss_position(self) -> int:
        """Return the position of this rank's last action but one that computes; -2: there is none.

        The last stages have all losses then, and their sum overlaps a backward.
        """
        order = self.schedule.orders[self.place]
        computing = [at for at, action in enumerate(order) if action.kind in KINDS]
        return computing[-2] if len(computing) > 1 else -2

    def places_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Return the places of the pipeline that hold one of `stages` in any pipe."""
        return self.schedule.holders(stages)

    def group(
        self, places: Sequence[int], axes: Axes = (), purpose: str = ""
    ) -> dist.ProcessGroup | None:
        """Return this rank's group over places of the pipeline and axes inside a stage.

        All ranks make all groups together, since torch names a group after their number. None: this
        rank is in no group, or alone.
        """
        local, holders = None, {rank for place in places for rank in self.meshes[place]}
        for ranks in self.mesh.groups((*self.axes, *axes)):
            members = [rank for rank in ranks if rank in holders]
            if len(members) > 1:
                local = world().group_of(members, purpose=purpose) or local
        return local


class TensorReaders:
    """The stages that read each parameter and buffer."""

    def __init__(self, program: RuntimeProgram) -> None:
        self._program = program
        self._stages: dict[str, list[int]] = {}
        for stage in program.stages:
            for name in [*stage.holds("parameter"), *stage.holds("buffer")]:
                self._stages.setdefault(name, []).append(stage.index)

    def stages(self, name: str) -> tuple[int, ...]:
        """Return the stages that read a tensor; the first stage holds one that none reads."""
        return tuple(self._stages.get(name, (0,)))

    def sum_key(self, movement: ParameterMovement) -> SumKey:
        """Return the key of the sum of a parameter's gradient."""
        mesh, state_axes = self._program.mesh, {*movement.places.optimizer.axes}
        backward_axes = in_mesh_order({*movement.summed.axes} - {*movement.leaf.axes}, mesh)
        return SumKey(
            movement.readers.stages,
            backward_axes,
            step_axes=in_mesh_order(state_axes - {*movement.summed.axes}, mesh),
            all_reduce_axes=in_mesh_order({*movement.pending} - state_axes, mesh),
            is_accumulated=movement.dtype != movement.reduce and not backward_axes,
            sums_to_host=movement.places.goes_up is not None,
            on_host="gradient" in movement.places.on_host,
        )


def bucket_entry(
    movement: ParameterMovement, key: SumKey, leaves: LocalParameters, mesh: Mesh, rank: int
) -> BucketEntry:
    """Return the bucket entry of a parameter of this rank: its leaf, and its gradient's pieces."""

    def pieces(coarse: Layout, fine: Layout, axes: Axes) -> TensorPieces | None:
        if not axes:
            return None
        return TensorPieces.between(coarse, fine, movement.shape, mesh=mesh, rank=rank, axes=axes)

    return BucketEntry(
        movement.name,
        leaves.by_name[movement.name],
        leaves.parameters[movement.name],
        math.prod(movement.leaf.largest_shape(movement.shape, mesh)) * movement.dtype.itemsize,
        pieces(movement.leaf, movement.summed, key.backward_axes),
        pieces(movement.summed, movement.places.optimizer, key.step_axes),
        movement.reduce,
    )


def gradient_sums(
    program: RuntimeProgram,
    readers: TensorReaders,
    ranks: StageRanks,
    *,
    movements: Mapping[str, ParameterMovement],
    groups: Groups,
    link: HostLink | None = None,
) -> dict[SumKey, ReductionSpec]:
    """Return the gradient sums in which this rank takes part; `link` copies sums to the host.

    Ranks of several places may complete sums in different orders, so each sum has its own group.
    """
    if not program.schedule.goes_back:
        return {}
    place, learned = ranks.place, frozenset().union(*program.parameters_by_output)
    keys = dict.fromkeys(readers.sum_key(m) for m in movements.values() if m.name in learned)
    wanted = {axes for key in keys for axes in (key.backward_axes, key.step_axes) if axes}
    scattering = Groups(program.mesh, wanted, ranks.meshes, "gradients")
    sums = {}
    for number, key in enumerate(keys):
        places = ranks.places_of(key.stages)
        if len(places) > 1:
            group = ranks.group(places, key.all_reduce_axes, f"gradients {number}")
        else:
            group = groups[key.all_reduce_axes] if key.all_reduce_axes else None
        is_work = (
            group or key.backward_axes or key.step_axes or key.is_accumulated or key.sums_to_host
        )
        if place in places and is_work:
            sums[key] = ReductionSpec(
                all_reduce_group=group,
                backward_group=scattering[key.backward_axes] if key.backward_axes else None,
                step_group=scattering[key.step_axes] if key.step_axes else None,
                completing_actions=_completing_actions(program.schedule, place, key.stages),
                last_action=_last_action(program.schedule, place, key.stages),
                is_accumulated=key.is_accumulated,
                link=link if key.sums_to_host else None,
            )
    return sums


def _completing_actions(schedule: Schedule, place: int, stages: Sequence[int]) -> dict[int, bool]:
    """Return the positions of actions that complete gradients of some stages, and whether each
    action is one backward pass, which computes each gradient once."""
    is_split = not schedule.split_stages.isdisjoint(stages)
    return {
        at: len(schedule.orders[place][at].microbatches) == 1 and not is_split
        for stage in stages
        for at in schedule.gradient_positions[place].get(stage, ())
    }


def _last_action(schedule: Schedule, place: int, stages: Sequence[int]) -> int:
    """Return the position of the action with which the sum of some stages' gradients starts.

    -1: this place has no micro-batch of them, and starts before its first action.
    """
    return max((schedule.sum_positions[place].get(stage, -1) for stage in stages), default=-1)
