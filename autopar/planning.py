"""plan(): the decisions about a model on some machines, without running anything.

options ──▶ request ──▶ candidates ──price──▶ the best of them ──▶ plan
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.admission import admit, require_loss
from autopar.capture import capture
from autopar.capture.dynamic import DynamicShapes, read_dynamic
from autopar.capture.failure import check_call
from autopar.cluster import Cluster
from autopar.mesh import Mesh
from autopar.options import (
    DynamicShapesLike,
    PlanOptions,
    RecomputeLike,
    ScheduleLike,
    StatesLike,
    read_request,
)
from autopar.plan.plan import Plan
from autopar.planner.offers import Choice, has_world
from autopar.planner.patience import SECONDS, Patience
from autopar.planner.request import Mode
from autopar.planner.verdict import cut_short, tell, warn
from autopar.precision import Precision
from autopar.progress import Report, reporter


def plan(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    mode: Mode = "auto",
    memory: float | str | None = None,
    strict: bool = False,
    microbatches: int | Literal["auto"] = "auto",
    pipeline: str | int | None = "auto",
    schedule: ScheduleLike = "auto",
    schedule_options: Mapping[str, Any] | None = None,
    recompute: RecomputeLike = "auto",
    precision: Precision | None = None,
    states: StatesLike = "auto",
    dynamic_shapes: DynamicShapesLike = None,
    seconds: float | None = SECONDS,
    progress: Report | bool | None = None,
) -> Plan:
    """Decide where every tensor of `model`, called with `args` and `kwargs`, lives.

    `cluster`: the machines; this one if not given. `mesh`: its axes; all are tried if not given.
    `mode`: "auto" searches for the least predicted time, "propagate" spreads the annotations,
    "data" cuts the batch. `memory`: of each device, as "40GB" or in bytes, at most what it has.
    `strict`: refuse operators without rules, in later programs too. `microbatches`: into how many
    equal parts a step cuts the batch, to run one after another ("auto" keeps it whole where batch
    norm would make parts another loss).
    `pipeline`: the axis of a pipeline ("auto": `pp`, if the mesh has it; without a mesh, what such
    an axis shall be called), a number of ranks, or None for no pipeline; `schedule`: a name, a
    mapping with a name and options, or a schedule, as `ap.pipeline.load("mine.csv")` reads one
    ("auto", or None: weighed with mode="auto", else 1f1b); `schedule_options`: options of the one
    that is named, as {"pipes": 4} of "chimera";
    `recompute`: which of the repeated blocks run their forward again in backward, "full" (or True)
    or "selective" (all that is cheap to make again), None (or False), or by module, as
    {"layers.*": "full"}, and no others; a `Recompute` also says where what is kept is kept;
    "auto": as much as memory asks for.
    What the model wraps in torch.utils.checkpoint is recomputed.
    `states`: into how many parts parameters, their gradients and what an optimizer keeps are cut
    over ranks that hold replicas: "whole", "zero1" (what an optimizer keeps), "zero2" (gradients
    too), "zero3" (parameters too), a `States` of numbers, or "auto": whole if that fits, else the
    fastest that does. Without a mesh, or with a pipeline whose schedule is "auto", mode="auto"
    weighs stages, micro-batches and schedules by simulation. `precision`: in which dtypes it
    computes and sums gradients, with parameters kept in more digits. `dynamic_shapes`: which dims
    of the inputs vary, and in what range, as `torch.export` takes it: these decisions then serve
    every size in it, with no other search. `torch.autocast` around this
    call is kept for every call of the program, as that in forward is. `seconds`: of this process
    (of all its cores together) that the choice may take once the model is captured: then the best
    so far is taken, which a warning says, with how much faster the rest might be (None: it takes
    all that it needs, and is the same each time). `progress` is told of each
    phase of a search and its detail, of later programs too; True shows them, False is silent, None
    shows those of this call on a terminal.
    """
    options = PlanOptions.among(locals())
    return make_plan(model, args, kwargs, options)


def make_plan(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any] | None, options: PlanOptions
) -> Plan:
    """The same with the options as one value."""
    return make_plans(model, args, kwargs, options)[0]


def make_plans(
    model: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    options: PlanOptions,
    profile: int | None = None,
) -> list[Plan]:
    """The fastest plans that differ, the best first: at most as many as steps will be run of."""
    request = replace(read_request(options), wanted=profile or 1)
    with reporter(options.progress) as report:
        report("capture", type(model).__name__)
        dynamic = _declared(model, args, kwargs, options)
        started = time.process_time()
        captured = capture(model, args, kwargs, options.precision)
        patience = Patience.begun(options.seconds, time.process_time() - started)
        if profile is not None:
            require_loss(captured, profile)
        admitted = replace(admit(captured, request, options), patience=patience)
        is_all = options.cluster is None or has_world()
        choice = Choice(model, captured, admitted, report, is_all)
        best, planner = choice.best()
        others = choice.kept.others
    tell(captured, best)
    if choice.ended:
        warn(cut_short(choice.ended, patience.seconds, best))
    return [
        Plan.of(
            one,
            mode=request.mode,
            limit=limit,
            constraints=planner.constraints(one.captured, one.decisions.recompute, one.mesh),
            alternatives=choice.alternatives,
            left_out=dict(choice.left_out),
            dynamic=dynamic,
            strict=options.strict,
            progress=options.progress or False,
        )
        for one, limit in ((best, planner.request.limit), *others)
    ]


def _declared(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any] | None, options: PlanOptions
) -> DynamicShapes | None:
    """Which sizes of the inputs vary."""
    if options.dynamic_shapes is None:
        return None
    check_call(model, args, kwargs)
    return read_dynamic(model, args, kwargs or {}, options.dynamic_shapes)
