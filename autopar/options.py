"""Options: what the doors take about a plan, read into a request, or refused.

>>> request = read_request(PlanOptions(mesh=Mesh(pp=2, dp=2), schedule="chimera"))
>>> list(request.sizes()), request.meshes(2)           # to weigh: a choice of one
([(2, 4)], [Mesh(dp=2)])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster import Cluster
from autopar.errors import InvalidInput, require_one_of
from autopar.mesh import AXIS_NAMES, Mesh
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import schedule as make_schedule
from autopar.planner.request import Mode, Request
from autopar.progress import Report
from autopar.schema import is_count

AXIS = "pp"
DEFAULT = "1f1b"
MODES: tuple[Mode, ...] = get_args(Mode)
ScheduleLike = str | Mapping[str, Any] | Schedule | None
_OF_A_SCHEDULE = ("schedule_options", "recompute")


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

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> PlanOptions:
        """Those of a function that takes them all, from its arguments by name."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def refuse_beside_plan(self) -> None:
        """Refuse whatever is given."""
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if given:
            got = f"plan= together with {', '.join(given)}"
            rule = "a finished plan leaves nothing to decide"
            raise InvalidInput(rule, got=got, remedy="give these to plan() instead")


def read_request(options: PlanOptions) -> Request:
    """What the options of `plan` ask for, if they do not contradict themselves.

    A pipeline whose schedule is not named is weighed by simulation, in all forms that are left
    open. One that is named takes twice as many micro-batches as ranks if no number is given.
    """
    mesh = _validated_mesh(options)
    count = None if options.microbatches == "auto" else int(options.microbatches)
    axis, stages = None, None
    if mesh is not None:
        axis, mesh = _pipeline_axis(mesh, options.pipeline)
    cluster = options.cluster
    if cluster is None:
        cluster = Cluster.local(_devices_here() if mesh is None else mesh.size, measure=False)
    limit = cluster.device.memory if options.memory is None else options.memory
    is_limited = options.mode == "auto" or options.memory is not None
    request = Request(cluster, options.mode, limit, is_limited, microbatches=count)
    is_weighed = options.mode == "auto" and options.schedule in ("auto", None)
    if mesh is None and is_weighed and options.pipeline is not None:
        axis, stages = _axis_to_make(options.pipeline)
    if axis is None:
        _refuse_words(
            options,
            (*(("pipeline",) if mesh is None else ()), "schedule", *_OF_A_SCHEDULE),
            "a schedule is for a pipeline on a given mesh, as are its options and recompute",
            f"give the mesh an axis {AXIS!r}, as in mesh=ap.Mesh({AXIS}=4, dp=2)",
            f" with {mesh or 'no mesh'}",
        )
        return replace(request, mesh=mesh, stages=1, microbatches=1 if count is None else count)
    if mesh is not None:
        stages = mesh[axis]
        if mesh.names == (axis,):  # a stage is on one rank: its placements need an axis, too
            mesh = Mesh(**mesh.sizes, dp=1)
    request = replace(request, axis=axis, mesh=mesh, stages=stages)
    if is_weighed or mesh is None:
        _refuse_words(
            options,
            _OF_A_SCHEDULE,
            "options and recompute need the name of the schedule that they are for",
            'schedule="chimera" or another name, beside them',
        )
        return request
    made = _schedule(options, mesh[axis], count)
    return replace(request, microbatches=made.all_parts, schedule=made, recompute=options.recompute)


def _refuse_words(
    options: PlanOptions, words: tuple[str, ...], rule: str, remedy: str, where: str = ""
) -> None:
    """Refuse those of some options that say something."""
    said = {word: getattr(options, word) for word in words}
    if named := ", ".join(f"{name}={v!r}" for name, v in said.items() if v and v != "auto"):
        raise InvalidInput(rule, got=f"{named}{where}", remedy=remedy)


def _validated_mesh(options: PlanOptions) -> Mesh | None:
    """The mesh, when this and the words beside it are what they have to be."""
    mesh, microbatches = options.mesh, options.microbatches
    require_one_of("mode", options.mode, MODES)
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


def _pipeline_axis(mesh: Mesh, pipeline: str | int | None) -> tuple[str | None, Mesh]:
    """The axis of the pipeline, if there is one, and the mesh of all ranks with it.

    `pipeline` names the axis ("auto": `pp`, if the mesh has it), or is a number of ranks that are
    put before the mesh's axes, or None.
    """
    if pipeline is None or (pipeline == "auto" and AXIS not in mesh):
        return None, mesh
    if is_count(pipeline) and AXIS not in mesh:
        return AXIS, Mesh(**{AXIS: int(pipeline), **mesh.sizes})
    is_there = pipeline == "auto" or (is_count(pipeline) and mesh[AXIS] == pipeline)
    name = AXIS if is_there else pipeline
    if not isinstance(name, str) or name not in mesh:
        raise InvalidInput(
            "pipeline is the name of an axis of the mesh, a number of ranks, or None",
            got=f"pipeline={pipeline!r} on {mesh}",
            remedy=f"one of {', '.join(map(repr, mesh.names))}",
        )
    return name, mesh


def _axis_to_make(pipeline: str | int) -> tuple[str, int | None]:
    """The name and the ranks (None: any) of the pipeline's axis, where the mesh is chosen too."""
    if is_count(pipeline):
        return AXIS, int(pipeline)
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
