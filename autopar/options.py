"""The options of `plan`, `parallelize` and `verify`, read into a request or refused.

>>> request = read_request(PlanOptions(mesh=Mesh(pp=2, dp=2), schedule="chimera"))
>>> list(request.sizes()), request.meshes(2)           # to weigh: a choice of one
([(2, 4)], [Mesh(dp=2)])
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.base.schema import FURTHEST, is_count
from autopar.candidates.patience import SECONDS, require_seconds
from autopar.candidates.recomputation import AskedRecomputation
from autopar.candidates.request import AXIS, Request
from autopar.cluster import Cluster
from autopar.cluster.presets import NAMES as PRESETS
from autopar.defaults import MODES, Mode
from autopar.errors import InvalidInput, require_one_of
from autopar.mesh import AXIS_NAMES, Mesh
from autopar.pipeline.requested_schedule import requested_schedule
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import FROM_FILE, known_names
from autopar.precision import Precision
from autopar.recompute import POLICY, Recompute, RecomputeSetting
from autopar.states import NAMED, States
from autopar.text.progress import Report
from autopar.text.source_lines import shorten
from autopar.text.suggestions import nearest
from autopar.text.units import LEAST_MEMORY, bytes_text, counted, read_bytes

StatesLike = Literal["auto", "whole", "zero1", "zero2", "zero3"] | States
ScheduleLike = str | Mapping[str, Any] | Schedule | None
DynamicShapesLike = Mapping[str, Any] | tuple[Any, ...] | list[Any] | None
# A checkpoint policy as torch takes it, or a list of operators whose results stay.
PolicyLike = Callable[..., Any] | list[Any] | tuple[Any, ...]
RecomputeLike = Literal["auto"] | RecomputeSetting | Mapping[str, RecomputeSetting | PolicyLike]
RECOMPUTE_NAMES = ("selective", "full")
OF_SCHEDULES = ("schedule_options",)


@dataclass(frozen=True)
class OptionKind:
    """The values that an option may have, as a test, in words and by an example."""

    words: str
    holds: Callable[[Any], bool]
    example: str
    names: tuple[str, ...] = ()
    others: str = ""  # what may stand in the place of a name

    def __call__(self, name: str, value: object) -> None:
        """Refuse a value that is something else."""
        if self.names and isinstance(value, str):
            require_one_of(name, value, self.names, self.others)
        elif not self.holds(value):
            got = f"{shorten(f'{name}={value!r}')}, of type {type(value).__name__}"
            remedy = f"{name}={self.example}"
            raise InvalidInput(f"{name} is {self.words}", got=got, remedy=remedy)


def _is_named(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _require_schedule(name: str, value: object) -> None:
    """Refuse a schedule that is unknown, or of another kind."""
    if isinstance(value, str):
        others = f"a mapping with name and options, or {FROM_FILE}"
        require_one_of(name, value, ("auto", *known_names()), others)
    elif isinstance(value, Mapping) and "name" in value:
        require_one_of("the name of a schedule", value["name"], known_names())
    SCHEDULE(name, value)


def _require_recompute(name: str, value: object) -> None:
    RECOMPUTE(name, value)
    for module, setting in value.items() if isinstance(value, Mapping) else ():
        if module == "policy" and _is_policy(setting):
            _require_operators(setting)
        else:
            MODULE_RECOMPUTE(f"{name} of {module!r}", setting)


def _is_policy(value: object) -> bool:
    """Return whether a value is a checkpoint policy, or a list of operators to save."""
    return callable(value) or isinstance(value, list | tuple)


def _require_operators(policy: Any) -> None:
    """Refuse a list of something else than overloads of operators."""
    for operator in () if callable(policy) else policy:
        if not isinstance(operator, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            raise InvalidInput(
                "a policy is a function, or a list of overloads of operators whose results stay",
                got=f"{operator!r} in recompute['policy']",
                remedy="recompute={'policy': [torch.ops.aten.mm.default]}",
            )


def recompute_policy(value: Any) -> Any:
    """Return the checkpoint policy that a value of `recompute` has; None if it has none."""
    policy = value.get("policy") if isinstance(value, Mapping) else None
    return policy if _is_policy(policy) else None


def _require_cluster(name: str, value: object) -> None:
    """Refuse what is no cluster; a text is taken for the name of a preset that is meant."""
    meant = nearest(value, PRESETS) if isinstance(value, str) else []
    known = f"; presets: {', '.join(PRESETS)}" if isinstance(value, str) else ""
    words = "a Cluster, or None for this machine"
    example = f'ap.Cluster.preset("{[*meant, *PRESETS][0]}"){known}'
    OptionKind(words, lambda cluster: isinstance(cluster, Cluster | None), example)(name, value)


def _read_recompute(value: Any) -> AskedRecomputation:
    """Read what is recomputed; modules that a mapping does not name keep everything, or what its
    policy says."""
    of = Recompute.of
    if isinstance(value, Mapping):
        blocks = of(None) if recompute_policy(value) is None else POLICY
        named = {n: v for n, v in value.items() if n != "policy" or blocks != POLICY}
        return AskedRecomputation(blocks, {name: of(entry) for name, entry in named.items()})
    return AskedRecomputation(value if value == "auto" else of(value))


SCHEDULE = OptionKind(
    "given by its name, as a mapping with name and options, or finished",
    lambda given: isinstance(given, str | Schedule | None) or _is_named(given),
    f'"chimera", {{"name": "chimera", "pipes": 4}}, or {FROM_FILE}',
)
MODULE_RECOMPUTE = OptionKind(
    '"selective", "full", None or a Recompute',
    lambda given: isinstance(given, bool | Recompute | None),
    '"full"',
    RECOMPUTE_NAMES,
    "None or a Recompute",
)
RECOMPUTE = OptionKind(
    '"auto", "selective", "full", None or a Recompute, or a mapping of names of modules to these, '
    'and of "policy" to a checkpoint policy',
    lambda given: isinstance(given, bool | Recompute | None) or _is_named(given),
    '"full", or {"layers.*": ap.Recompute("full", keep="host")}',
    ("auto", *RECOMPUTE_NAMES),
    "None, a Recompute, or a mapping of names of modules to these",
)
FLAG = OptionKind("True or False", lambda given: isinstance(given, bool), "True")
# For each option a function that refuses a value which is wrong whatever the other options are.
OPTION_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "cluster": _require_cluster,
    "mesh": OptionKind(
        "a Mesh or a torch DeviceMesh",
        lambda given: isinstance(given, Mesh | DeviceMesh | None),
        "ap.Mesh(dp=2, tp=4)",
    ),
    "mode": partial(require_one_of, known=MODES),
    "memory": OptionKind(
        "a number of bytes from 1000 on, or with its unit",
        lambda given: given is None or LEAST_MEMORY <= read_bytes(given) <= FURTHEST,
        '"40GB", "512MiB", 40e9, or None for what the devices have but for a reserve',
    ),
    "reserve": OptionKind(
        "a number of bytes, or with its unit",
        lambda given: given is None or 0 <= read_bytes(given) <= FURTHEST,
        '"4GB", 0 for none, or None for that of the kind of device',
    ),
    "strict": FLAG,
    "microbatches": OptionKind(
        'a number from 1, or "auto"',
        lambda given: is_count(given) or (isinstance(given, str) and given == "auto"),
        "8",
    ),
    "pipeline": OptionKind(
        "the name of an axis of the mesh, a number of ranks, or None",
        lambda given: isinstance(given, str | Integral | None) and not isinstance(given, bool),
        "4",
    ),
    "schedule": _require_schedule,
    "schedule_options": OptionKind(
        "a mapping of names to values",
        lambda given: given is None or _is_named(given),
        '{"pipes": 4}',
    ),
    "asynchronous": FLAG,
    "recompute": _require_recompute,
    "precision": OptionKind(
        "a Precision, or None for that of the model",
        lambda given: isinstance(given, Precision | None),
        "ap.Precision(compute=torch.bfloat16)",
    ),
    "states": OptionKind(
        "a name, or numbers of parts",
        lambda given: isinstance(given, States),
        '"zero1", or ap.States(parameters=1, gradients=4, optimizer=8)',
        ("auto", *NAMED),
        "a States of numbers of parts",
    ),
    "dynamic_shapes": OptionKind(
        "a mapping by names of inputs, or a tuple or list in their order, as torch.export takes",
        lambda given: given is None or isinstance(given, tuple | list) or _is_named(given),
        '{"ids": {0: torch.export.Dim("batch", max=64)}}',
    ),
    "seconds": require_seconds,
    "progress": OptionKind(
        "True, False, None or a function of phase and detail",
        lambda given: isinstance(given, bool | None) or callable(given),
        "print",
    ),
}


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan` as its caller gives them."""

    cluster: Cluster | None = None
    mesh: Mesh | DeviceMesh | None = None
    mode: Mode = "auto"
    memory: float | str | None = None
    reserve: float | str | None = None
    strict: bool = False
    microbatches: int | Literal["auto"] = "auto"
    pipeline: str | int | None = "auto"
    schedule: ScheduleLike = "auto"
    schedule_options: Mapping[str, Any] | None = None
    asynchronous: bool = False
    recompute: RecomputeLike = "auto"
    precision: Precision | None = None
    states: StatesLike = "auto"
    dynamic_shapes: DynamicShapesLike = None
    seconds: float | None = SECONDS
    progress: Report | bool | None = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> PlanOptions:
        """Pick these options from `locals()` of the public function that declares them all."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def require_kinds(self) -> None:
        """Refuse an option of the wrong kind."""
        for name, require in OPTION_CHECKS.items():
            require(name, getattr(self, name))

    def refuse_beside_plan(self) -> None:
        """Refuse every option that differs from its default, for use with a finished plan."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if changed:
            got = f"plan= together with {', '.join(changed)}"
            rule = "a finished plan leaves nothing to decide"
            raise InvalidInput(rule, got=got, remedy="give these to plan() instead")


def read_request(options: PlanOptions) -> Request:
    """Read the options of `plan` into a request; refuse those that contradict each other.

    A pipeline whose schedule is not named is weighed by simulation, in all forms that are left
    open. One that is named takes twice as many micro-batches as ranks if no number is given.
    """
    options.require_kinds()
    mesh = options.mesh
    if isinstance(mesh, DeviceMesh):
        mesh = Mesh.from_device_mesh(mesh)
    count = None if options.microbatches == "auto" else int(options.microbatches)
    axis, stages = None, None
    if mesh is not None:
        axis, mesh = _pipeline_axis(mesh, options.pipeline)
    cluster = options.cluster
    if cluster is None:
        cluster = Cluster.local(_devices_here() if mesh is None else mesh.size, measure=False)
    if mesh is not None:
        cluster.require_room(mesh)
    if options.reserve is not None:
        if options.memory is not None:
            raise InvalidInput(
                "a reserve is what is left of a device's memory, of which a plan uses the rest",
                got=f"reserve={options.reserve!r} beside memory={options.memory!r}",
                remedy="one of the two",
            )
        cluster = cluster.with_reserve(read_bytes(options.reserve))
    limit = read_limit(options.memory, cluster)
    is_limited = options.mode == "auto" or options.memory is not None
    request = Request(cluster, options.mode, limit, is_limited, microbatches=count)
    if options.states != "auto":
        states = options.states
        states = states if isinstance(states, States) else States.of(states)
        request = replace(request, states=states)
    request = replace(request, recompute=_read_recompute(options.recompute))
    is_weighed = options.mode == "auto" and options.schedule in ("auto", None)
    if mesh is None and is_weighed and options.pipeline is not None:
        axis, stages = _axis_to_make(options.pipeline, cluster.devices)
    if axis is None:
        _refuse_options(
            options,
            (
                *(("pipeline",) if mesh is None else ()),
                "schedule",
                "asynchronous",
                *OF_SCHEDULES,
            ),
            "a schedule is for a pipeline on a given mesh, as are its options",
            f"give the mesh an axis {AXIS!r}, as in mesh=ap.Mesh({AXIS}=4, dp=2)",
            f" with {mesh or 'no mesh'}",
        )
        if count is None and options.mode != "auto":
            count = 1
        if mesh is None and options.mode == "data":
            mesh = Mesh(dp=cluster.devices)
        if mesh is None and options.mode == "propagate" and cluster.devices > 1:
            raise InvalidInput(
                'mode="propagate" spreads annotations over a mesh that is given',
                got=f"no mesh, and {counted(cluster.devices, 'device')}",
                remedy=f'mesh=Mesh(dp={cluster.devices}), or mode="auto", which chooses one',
            )
        return replace(request, mesh=mesh, stages=1, microbatches=count)
    if mesh is not None:
        stages = mesh[axis]
        if mesh.names == (axis,):  # a stage is on one rank: its placements need an axis, too
            mesh = Mesh(**mesh.sizes, dp=1)
    asynchronous = options.asynchronous
    request = replace(request, axis=axis, mesh=mesh, stages=stages, asynchronous=asynchronous)
    if is_weighed or mesh is None:
        _refuse_options(
            options,
            OF_SCHEDULES,
            "options need the name of the schedule that they are for",
            'schedule="chimera" or another name, beside them',
        )
        return request
    schedule = requested_schedule(
        options.schedule,
        options.schedule_options,
        ranks=mesh[axis],
        count=count,
        asynchronous=asynchronous,
    )
    return replace(request, microbatches=schedule.batch_parts, schedule=schedule)


def _refuse_options(
    options: PlanOptions, names: tuple[str, ...], rule: str, remedy: str, where: str = ""
) -> None:
    """Refuse those of some options that are neither empty nor "auto"."""
    values = {name: getattr(options, name) for name in names}
    if named := ", ".join(f"{name}={v!r}" for name, v in values.items() if v and v != "auto"):
        raise InvalidInput(rule, got=f"{named}{where}", remedy=remedy)


def read_limit(memory: float | str | None, cluster: Cluster) -> float:
    """Return the bytes of each device that a plan keeps to; refuse more than the smallest has."""
    has, usable = cluster.device.memory, cluster.device.usable_memory
    if memory is None:
        return usable
    if (limit := read_bytes(memory)) > has:
        raise InvalidInput(
            "memory is at most what each device has",
            got=f"memory={memory!r} on {cluster.device.name}, which has {bytes_text(has)}",
            remedy="less, or None for what they have but for a reserve",
        )
    # The limit holds for larger devices too. Less by a hair, it differs from the default, which
    # lets each device use all that it has.
    is_for_all = any(node.device.usable_memory > usable for node in cluster.nodes)
    return math.nextafter(limit, 0.0) if limit == usable and is_for_all else limit


def _devices_here() -> int:
    """Return the number of devices of this process: the ranks of its world, its GPUs or cores."""
    if dist.is_initialized():
        return dist.get_world_size()
    if dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() or os.cpu_count() or 1


def _pipeline_axis(mesh: Mesh, pipeline: str | int | None) -> tuple[str | None, Mesh]:
    """Return the axis of the pipeline, if there is one, and the mesh of all ranks with it.

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


def _axis_to_make(pipeline: str | int, devices: int) -> tuple[str, int | None]:
    """Return the name and the ranks (None: any) of a pipeline's axis on a mesh to be chosen."""
    if is_count(pipeline):
        if devices % int(pipeline):
            raise InvalidInput(
                "the stages of a pipeline share the devices of the cluster evenly",
                got=f"pipeline={pipeline} on {counted(devices, 'device')}",
                remedy='a divisor of the number of devices, or pipeline="auto"',
            )
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
