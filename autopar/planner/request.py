"""Pipelining: the decisions about a pipeline as plain values, and how a user's words become them.

request = read_request(mesh, "auto", "chimera", {"pipes": 2}, microbatches=8)
request.inner                        # the mesh inside each stage
request.pipelining(stages)           # with the stages that the model was cut into
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.pipeline.checker import check
from autopar.pipeline.notation import to_text
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import schedule as make_schedule
from autopar.pipeline.stages.costs import StageCost, imbalance
from autopar.planner.meshes import AXIS_NAMES
from autopar.search.stored import Axes

AXIS = "pp"
DEFAULT = "1f1b"
ScheduleLike = str | Mapping[str, Any] | Schedule | None


@dataclass(frozen=True)
class Pipelining:
    """How a program runs as a pipeline."""

    axis: str
    mesh: Mesh  # of all ranks, the pipeline's axis among them
    schedule: Schedule
    stages: tuple[StageCost, ...]
    recompute: bool = False

    def data(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "axis": self.axis,
            "mesh": dict(zip(self.mesh.names, self.mesh.shape)),
            "schedule": to_text(self.schedule),
            "stages": [asdict(stage) for stage in self.stages],
            "recompute": self.recompute,
        }

    def ranks_at(self, coordinate: int) -> list[int]:
        """The ranks that stand at one place of the pipeline, in the order of the inner mesh."""
        return [
            rank
            for rank in range(self.mesh.size)
            if self.mesh.coordinate(rank)[self.axis] == coordinate
        ]

    def __str__(self) -> str:
        made = self.schedule
        options = "".join(f", {name}={value}" for name, value in made.options)
        lines = [
            f"pipeline over {self.axis}: {made.name}{options}, {len(self.stages)} stages, "
            f"{made.microbatches} micro-batches, imbalance {imbalance(self.stages):.0%}"
        ]
        for index, stage in enumerate(self.stages):
            ranks = ", ".join(map(str, made.replicas_of(index)))
            lines.append(
                f"  stage {index} on {ranks}: from {stage.starts} ({stage.module or 'the model'}), "
                f"forward {stage.forward:.3g} s, backward {stage.backward:.3g} s, "
                f"{stage.parameters} bytes of parameters"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class StoredPipelining:
    """What `Pipelining.data` gives."""

    axis: str
    mesh: Axes
    schedule: Schedule
    stages: tuple[StageCost, ...]
    recompute: bool

    def read(self) -> Pipelining:
        return Pipelining(self.axis, Mesh(**self.mesh), self.schedule, self.stages, self.recompute)


@dataclass(frozen=True)
class Request:
    """What is asked for by name of how a step runs. None: it is to be chosen."""

    axis: str | None = None  # of the pipeline; without an axis there is no pipeline
    mesh: Mesh | None = None  # of all ranks
    stages: int | None = None  # ranks along the axis
    microbatches: int | None = None
    schedule: Schedule | None = None
    recompute: bool = False  # with that schedule

    @property
    def inner(self) -> Mesh | None:
        """The mesh inside each stage."""
        if self.mesh is None or self.axis is None:
            return self.mesh
        return self.mesh.without(self.axis)


def open_request(
    mesh: Mesh | None, pipeline: str | int | None, microbatches: int | None
) -> Request:
    """A pipeline, or none, is to be chosen: with these words, as far as they are given."""
    if mesh is None:
        axis, stages = axis_to_make(pipeline)
        return Request(axis, None, stages, microbatches)
    named, mesh = pipeline_axis(mesh, pipeline)
    assert named is not None
    return Request(named, with_inner_axes(mesh, named), mesh[named], microbatches)


def read_request(
    mesh: Mesh | None,
    pipeline: str | int | None,
    schedule: ScheduleLike,
    options: Mapping[str, Any] | None,
    microbatches: int | None,
    recompute: bool = False,
) -> Request:
    """What `plan`'s arguments say where they name a pipeline with its schedule, or none.

    `pipeline` names the axis ("auto": `pp`, if the mesh has it), or is a number of ranks that are
    put before the mesh's axes, or None. Twice as many micro-batches as ranks are taken if no number
    of them is given.
    """
    axis, whole = (None, None) if mesh is None else pipeline_axis(mesh, pipeline)
    if axis is None or whole is None:
        where, pipeline = ("no mesh", pipeline) if mesh is None else (str(mesh), None)
        refuse_without_pipeline(where, pipeline, schedule, options, recompute)
        return Request(None, mesh, 1, 1 if microbatches is None else microbatches)
    named = None if schedule == "auto" else schedule
    if microbatches is None:
        microbatches = named.microbatches if isinstance(named, Schedule) else 2 * whole[axis]
    made = _schedule(named, dict(options or {}), whole[axis], microbatches)
    whole = with_inner_axes(whole, axis)
    return Request(axis, whole, whole[axis], made.slices, made, recompute)


def refuse_without_pipeline(
    where: str,
    pipeline: str | int | None,
    schedule: ScheduleLike,
    options: Mapping[str, Any] | None,
    recompute: bool,
) -> None:
    """Refuse words about a pipeline where there is none that they could be about."""
    words = {
        "pipeline": pipeline,
        "schedule": schedule,
        "schedule_options": options,
        "recompute": recompute,
    }
    given = [f"{name}={value!r}" for name, value in words.items() if value and value != "auto"]
    if given:
        raise InvalidInput(
            "a schedule is for a pipeline on a given mesh, as are its options and recompute",
            got=f"{', '.join(given)} with {where}",
            remedy=f"give the mesh an axis {AXIS!r}, as in mesh=ap.Mesh({AXIS}=4, dp=2)",
        )


def pipeline_axis(mesh: Mesh, pipeline: str | int | None) -> tuple[str | None, Mesh]:
    """The axis of the pipeline, if there is one, and the mesh of all ranks with it."""
    if pipeline is None or (pipeline == "auto" and AXIS not in mesh):
        return None, mesh
    if isinstance(pipeline, int) and not isinstance(pipeline, bool) and pipeline > 0:
        if AXIS not in mesh:
            return AXIS, Mesh(**{AXIS: pipeline, **dict(zip(mesh.names, mesh.shape))})
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
    if mesh.without(axis).names:
        return mesh
    return Mesh(**dict(zip(mesh.names, mesh.shape)), dp=1)


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


def _schedule(
    given: ScheduleLike, options: dict[str, Any], ranks: int, microbatches: int
) -> Schedule:
    if isinstance(given, Schedule):
        if options or given.ranks != ranks or microbatches not in (1, given.microbatches):
            raise InvalidInput(
                "a finished schedule fits the mesh and the micro-batches, and takes no options",
                got=f"a schedule of {given.ranks} ranks and {given.microbatches} micro-batches for "
                f"{ranks} ranks and {microbatches} micro-batches, options {options}",
                remedy="make the schedule for this mesh, or give its name",
            )
        check(given)
        return given
    if isinstance(given, Mapping):
        options = {**given, **options}
        given = options.pop("name", DEFAULT)
    name = DEFAULT if given is None else given
    if not isinstance(name, str):
        raise InvalidInput(
            "a schedule is given by its name, as a mapping with name and options, or finished",
            got=repr(given),
            remedy='schedule="chimera", {"name": "chimera", "pipes": 4}, or what '
            "autopar.pipeline.load reads from a file",
        )
    made = make_schedule(name, stages=ranks, microbatches=microbatches, **options)
    check(made)
    return made
