"""Request: everything that is asked of a plan; what is given by hand is a choice of one.

request = read_request(PlanOptions(mesh=Mesh(pp=2, dp=2), schedule="chimera"))
list(request.sizes())                # (stages, micro-batches) to weigh: one
request.meshes(2)                    # the meshes inside a stage: one
list(request.schedules(2, 4))        # the schedules: one
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster import Cluster
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import schedule as make_schedule
from autopar.planner.meshes import AXIS_NAMES, meshes
from autopar.progress import Report

AXIS = "pp"
DEFAULT = "1f1b"
Mode = Literal["auto", "propagate", "data"]
MODES: tuple[Mode, ...] = get_args(Mode)
ScheduleLike = str | Mapping[str, Any] | Schedule | None

MOST_AXES = 3  # of a mesh without a pipeline
MOST_INNER_AXES = 2  # of a mesh inside each stage
MOST_STAGES = 16  # that are tried unasked
ROUNDS = (1, 2, 4)  # micro-batches tried, in multiples of the number of stages
# Schedules that are priced where they exist: names with options.
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {}),
    ("interleaved", {"chunks": 2}),
    ("zb-h1", {}),
    ("zb-v", {}),
    ("chimera", {"scale": "direct"}),
    ("chimera", {"scale": "list"}),
)


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan`, as they were given."""

    cluster: Cluster | None = None
    mesh: Mesh | DeviceMesh | None = None
    mode: Mode = "auto"
    memory: float | None = None
    strict: bool = False
    microbatches: int | Literal["auto"] = "auto"
    pipeline: str | int | None = "auto"
    schedule: ScheduleLike = "auto"
    schedule_options: Mapping[str, Any] | None = None
    recompute: bool = False
    progress: Report | bool | None = None

    @property
    def given(self) -> list[str]:
        """The names of those that are not as they are without a word."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


@dataclass(frozen=True)
class Request:
    """What is asked for of how a step runs. None: it is to be chosen."""

    cluster: Cluster
    mode: Mode
    limit: float  # bytes of each device
    is_limited: bool  # a plan that takes more is none
    axis: str | None = None  # of the pipeline; without an axis there is no pipeline
    mesh: Mesh | None = None  # of all ranks
    stages: int | None = None  # ranks along the axis
    microbatches: int | None = None
    schedule: Schedule | None = None
    recompute: bool = False  # with that schedule

    @property
    def memory(self) -> float:
        """The bytes of each device that a plan keeps to."""
        return self.limit if self.is_limited else math.inf

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Numbers of stages and of micro-batches to try."""
        devices = self.cluster.devices
        most = min(devices, MOST_STAGES)
        counts = [n for n in range(1, most + 1) if devices % n == 0]
        for count in [self.stages] if self.stages else counts:
            if self.microbatches is not None:
                yield count, self.microbatches
            elif count == 1:
                yield 1, 1
            else:
                yield from ((count, count * rounds) for rounds in ROUNDS)

    def meshes(self, stages: int) -> Sequence[Mesh]:
        """The meshes to try inside each of so many stages."""
        if self.mesh is not None:
            return [self.mesh if self.axis is None else self.mesh.without(self.axis)]
        most = MOST_AXES if stages == 1 else MOST_INNER_AXES
        return meshes(self.cluster.devices // stages, most, self.cluster)

    def schedules(self, stages: int, microbatches: int) -> Iterator[Schedule]:
        """The schedules to try, those that exist for these numbers."""
        if self.schedule is not None:
            yield self.schedule
            return
        for name, options in SCHEDULES:
            try:
                made = make_schedule(name, stages=stages, microbatches=microbatches, **options)
                check(made)
            except InvalidInput:
                continue
            yield made


def read_request(options: PlanOptions) -> Request:
    """What the options of `plan` ask for, if they do not contradict themselves.

    A pipeline whose schedule is not named is weighed by simulation, in all forms that are left
    open. One that is named takes twice as many micro-batches as ranks if no number is given.
    """
    mesh = _validated_mesh(options)
    count = None if options.microbatches == "auto" else int(options.microbatches)
    axis, whole = (None, None) if mesh is None else pipeline_axis(mesh, options.pipeline)
    cluster = options.cluster
    if cluster is None:
        cluster = Cluster.local(_devices_here() if whole is None else whole.size, measure=False)
    limit = cluster.device.memory if options.memory is None else options.memory
    machines = cluster, options.mode, limit, options.mode == "auto" or options.memory is not None
    is_weighed = options.mode == "auto" and options.schedule in ("auto", None)
    if mesh is None and is_weighed and options.pipeline is not None:
        _require_nothing_about_a_schedule(options)
        axis, stages = axis_to_make(options.pipeline)
        return Request(*machines, axis, None, stages, count)
    if axis is None or whole is None:
        _refuse_without_pipeline(options, mesh)
        return Request(*machines, None, mesh, 1, 1 if count is None else count)
    ranks, whole = whole[axis], with_inner_axes(whole, axis)
    if is_weighed:
        _require_nothing_about_a_schedule(options)
        return Request(*machines, axis, whole, ranks, count)
    made = _schedule(options, ranks, count)
    return Request(*machines, axis, whole, ranks, made.slices, made, options.recompute)


def _validated_mesh(options: PlanOptions) -> Mesh | None:
    """The mesh, when this and the words beside it are what they have to be."""
    mode, mesh, microbatches = options.mode, options.mesh, options.microbatches
    if mode not in MODES:
        raise InvalidInput(
            "mode is one of " + ", ".join(map(repr, MODES)), got=repr(mode), remedy=repr(MODES[0])
        )
    if isinstance(mesh, DeviceMesh):
        mesh = Mesh.from_device_mesh(mesh)
    if not isinstance(mesh, Mesh | None):
        raise InvalidInput(
            "mesh is a Mesh or a torch DeviceMesh",
            got=f"{type(mesh).__name__}: {mesh!r}",
            remedy="mesh=ap.Mesh(dp=2, tp=4)",
        )
    if not (microbatches == "auto" or isinstance(microbatches, int)):
        raise InvalidInput(
            'microbatches is a number or "auto"', got=repr(microbatches), remedy="microbatches=8"
        )
    return mesh


def _devices_here() -> int:
    """How many devices this process can count on: its world, its GPUs, or its cores."""
    if dist.is_initialized():
        return dist.get_world_size()
    if dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() or os.cpu_count() or 1


def _named(options: PlanOptions, *words: str) -> str:
    """Those of some options that say something, as they were written."""
    given = {word: getattr(options, word) for word in words}
    return ", ".join(f"{name}={v!r}" for name, v in given.items() if v and v != "auto")


def _require_nothing_about_a_schedule(options: PlanOptions) -> None:
    """Where schedules are weighed, so are their options, and whether stages recompute."""
    if named := _named(options, "schedule_options", "recompute"):
        raise InvalidInput(
            "options and recompute need the name of the schedule that they are for",
            got=named,
            remedy='schedule="chimera" or another name, beside them',
        )


def _refuse_without_pipeline(options: PlanOptions, mesh: Mesh | None) -> None:
    """Refuse words about a pipeline where there is none that they could be about."""
    words = ("schedule", "schedule_options", "recompute")
    if named := _named(options, *(("pipeline",) if mesh is None else ()), *words):
        raise InvalidInput(
            "a schedule is for a pipeline on a given mesh, as are its options and recompute",
            got=f"{named} with {mesh or 'no mesh'}",
            remedy=f"give the mesh an axis {AXIS!r}, as in mesh=ap.Mesh({AXIS}=4, dp=2)",
        )


def pipeline_axis(mesh: Mesh, pipeline: str | int | None) -> tuple[str | None, Mesh]:
    """The axis of the pipeline, if there is one, and the mesh of all ranks with it.

    `pipeline` names the axis ("auto": `pp`, if the mesh has it), or is a number of ranks that are
    put before the mesh's axes, or None.
    """
    if pipeline is None or (pipeline == "auto" and AXIS not in mesh):
        return None, mesh
    if isinstance(pipeline, int) and not isinstance(pipeline, bool) and pipeline > 0:
        if AXIS not in mesh:
            return AXIS, Mesh(**{AXIS: pipeline, **mesh.sizes})
        if mesh[AXIS] == pipeline:
            return AXIS, mesh
    name = AXIS if pipeline == "auto" else pipeline
    if not isinstance(name, str) or name not in mesh:
        raise InvalidInput(
            "pipeline is the name of an axis of the mesh, a number of ranks, or None",
            got=f"pipeline={pipeline!r} on {mesh}",
            remedy=f"one of {', '.join(map(repr, mesh.names))}",
        )
    return name, mesh


def with_inner_axes(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of a pipeline: if a stage is on one rank, with an axis of one for placements."""
    return mesh if mesh.without(axis).names else Mesh(**mesh.sizes, dp=1)


def axis_to_make(pipeline: str | int | None) -> tuple[str, int | None]:
    """The name and the ranks (None: any) of the pipeline's axis, where the mesh is chosen too."""
    if isinstance(pipeline, int) and not isinstance(pipeline, bool) and pipeline > 0:
        return AXIS, pipeline
    if pipeline == "auto":
        return AXIS, None
    if not isinstance(pipeline, str) or not pipeline.isidentifier() or pipeline in AXIS_NAMES:
        raise InvalidInput(
            "without a mesh, pipeline is a name for its axis, a number of ranks, or None",
            got=f"pipeline={pipeline!r}",
            remedy=f"another name than those of the other axes, {', '.join(AXIS_NAMES)}",
        )
    return pipeline, None


def _schedule(options: PlanOptions, ranks: int, count: int | None) -> Schedule:
    """The one that is named, by itself or in its mapping, or finished."""
    given = None if options.schedule == "auto" else options.schedule
    words = dict(options.schedule_options or {})
    if isinstance(given, Schedule):
        count = given.microbatches if count is None else count
        if words or given.ranks != ranks or count not in (1, given.microbatches):
            raise InvalidInput(
                "a finished schedule fits the mesh and the micro-batches, and takes no options",
                got=f"a schedule of {given.ranks} ranks and {given.microbatches} micro-batches for "
                f"{ranks} ranks and {count} micro-batches, options {words}",
                remedy="make the schedule for this mesh, or give its name",
            )
        check(given)
        return given
    if isinstance(given, Mapping):
        words = {**given, **words}
        given = words.pop("name", DEFAULT)
    name = DEFAULT if given is None else given
    if not isinstance(name, str):
        raise InvalidInput(
            "a schedule is given by its name, as a mapping with name and options, or finished",
            got=repr(given),
            remedy='schedule="chimera", {"name": "chimera", "pipes": 4}, or what '
            "autopar.pipeline.load reads from a file",
        )
    count = 2 * ranks if count is None else count
    made = make_schedule(name, stages=ranks, microbatches=count, **words)
    check(made)
    return made
