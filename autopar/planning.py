"""plan(): the decisions about a model on some machines, without running anything.

options ──▶ request ──▶ candidates ──price──▶ the best of them ──▶ plan
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.admission import admit, require_loss
from autopar.candidates.patience import SECONDS, Patience
from autopar.candidates.recomputation import Regions
from autopar.candidates.slice_times import SliceCosts
from autopar.capture import capture
from autopar.capture.annotations import marked_regions
from autopar.capture.dynamic import DynamicShapes, read_dynamic
from autopar.capture.failure import check_call
from autopar.capture.policies import ask_policy
from autopar.cluster import Cluster
from autopar.defaults import Mode
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.options import (
    DynamicShapesLike,
    PlanOptions,
    RecomputeLike,
    ScheduleLike,
    StatesLike,
    read_request,
    recompute_policy,
)
from autopar.passes.microbatches import batch_size
from autopar.pipeline.requested_schedule import sliced_by_price
from autopar.planner.offers import Choice, has_world
from autopar.plans.plan import Plan
from autopar.plans.verdict import cut_short, tell, tell_of_uncut, tell_of_whole_states, warn
from autopar.precision import Precision
from autopar.text.progress import Report, reporter

_MOST_SEQUENCES = 8  # micro-batches that are tried where slices of tokens follow by price


def plan(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    mode: Mode = "auto",
    memory: float | str | None = None,
    reserve: float | str | None = None,
    strict: bool = False,
    microbatches: int | Literal["auto"] = "auto",
    pipeline: str | int | None = "auto",
    schedule: ScheduleLike = "auto",
    schedule_options: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    recompute: RecomputeLike = "auto",
    precision: Precision | None = None,
    states: StatesLike = "auto",
    dynamic_shapes: DynamicShapesLike = None,
    seconds: float | None = SECONDS,
    progress: Report | bool | None = None,
) -> Plan:
    """Decides how a step of `model` runs, without running anything.

    Needs no device and no values: models and inputs may be on the meta device. Models inside
    `torch.autocast` are planned with these casts.

    Args:
        model: An ordinary module. It is not changed.
        args: The positional arguments of one global batch, as an example.
        kwargs: The keyword arguments of the same call.
        cluster: The machines. None: the GPUs of this machine, or a DGX H100 where there are none.
            Example: `ap.Cluster.preset("dgx-a100", nodes=4)`.
        mesh: The axes over all ranks. None: it is chosen among all that fit the cluster, and its
            axes are named by what they do: `dp`, `tp`, `sp`, `ep`. Example: `ap.Mesh(dp=2, tp=4)`;
            a torch `DeviceMesh` is accepted.
        mode: "auto" searches for the least predicted time, takes the simplest plan within 1% of
            it, and keeps annotations; "propagate"
            spreads annotations without a search; "data" cuts the batch and nothing else.
        memory: The bytes of each device that a plan may use, at most what the device has. None:
            what it has but for the reserve. Example: `"40GB"`.
        reserve: The bytes of each device that are left for what is no tensor: the driver, buffers
            of groups of ranks, gaps of the allocator. None: that of the kind of device, 5 of 80 GB
            on a GPU and nothing on a CPU. Example: `"8GB"`.
        strict: Refuse operators that have no rule. They otherwise run whole on every rank.
        microbatches: Into how many equal parts a step cuts the batch, to run one after another.
            "auto" chooses; it keeps the batch whole where batch norm would compute another loss.
        pipeline: The name of the mesh axis of the pipeline, or its number of stages. "auto": `pp`,
            if the mesh has it, and without a mesh any number of stages; None: no pipeline.
        schedule: A name such as "1f1b" or "chimera", a mapping with a name and options, or a
            schedule that `ap.pipeline.load("mine.csv")` read. "auto" weighs all in mode "auto", and
            takes "1f1b" in the other modes.
        schedule_options: The options of the schedule that is named. Example: `{"pipes": 4}`.
        asynchronous: Whether gradients may be older than the weights that they change, as in
            "pipedream-2bw" and "pipedream": another trajectory of the optimizer. `module.run` keeps
            such a pipeline full from step to step.
        recompute: Which blocks run their forward again in backward: "full", "selective" (what is
            cheap to make again), None, or a mapping of module names to these. "auto": as much as
            memory asks for. Example: `{"layers.*": "full"}`. Blocks inside
            `torch.utils.checkpoint` are always recomputed. `{"policy": ...}` takes a checkpoint
            policy as torch does, or a list of operators whose results stay.
        precision: The dtypes of computing and of gradient sums. None: those of the model. Example:
            `ap.Precision(compute=torch.bfloat16)`.
        states: How ZeRO cuts parameters, gradients and optimizer states over replicas: "whole",
            "zero1", "zero2", "zero3", or `ap.States(...)` with a number of parts for each. "auto":
            whole if that fits, otherwise the fastest setting that does.
        dynamic_shapes: Which dims of the inputs vary, and in what range, as `torch.export` takes
            it. One plan then serves every size in the range. Example:
            `({0: Dim("rows", max=64)},)`.
        seconds: The CPU seconds that the choice may take after capture, over all cores of this
            process. Then the best plan so far is taken, with a warning. None: no limit, and the
            same plan each time.
        progress: Whether to show the phases of the search: True, False, or a function of phase and
            detail. None: only on a terminal.

    Returns:
        The plan: print it, `explain` a decision, `save` it, or hand it to `parallelize`.
    """
    options = PlanOptions.from_arguments(locals())
    return make_plan(model, args, kwargs, options)


def make_plan(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any] | None, options: PlanOptions
) -> Plan:
    """Return the plan of `plan()`, whose options come as one value."""
    return make_plans(model, args, kwargs, options)[0]


def make_plans(
    model: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    options: PlanOptions,
    profile: int | None = None,
) -> list[Plan]:
    """Return the fastest plans that differ, the best first: at most `profile`, or one."""
    if (by_price := sliced_by_price(options.schedule, options.schedule_options)) is not None:
        name, settings = by_price
        named = replace(options, schedule=name, schedule_options=settings)
        options = _with_slices(model, args, kwargs, named)
    request = read_request(options)
    with reporter(options.progress) as report:
        report("capture", type(model).__name__)
        dynamic = _declared(model, args, kwargs, options)
        started = time.process_time()
        captured = capture(model, args, kwargs, options.precision)
        if (policy := recompute_policy(options.recompute)) is not None:
            regions = Regions(captured, request.recompute, marked_regions(model))
            captured = ask_policy(captured, regions.by_policy, policy)
        patience = Patience.begun(options.seconds, time.process_time() - started)
        if profile is not None:
            require_loss(captured, profile)
        admitted = replace(admit(captured, request, options), patience=patience)
        uses_every_device = options.cluster is None or has_world()
        choice = Choice(model, captured, admitted, report, uses_every_device=uses_every_device)
        ways = choice.best(profile or 1)
    best, _ = ways[0]
    if best.pipelining is not None and (error := choice.inseparable) is not None:
        warn(f"the step has one micro-batch, and each stage waits for others: {error.got}")
    tell(captured, best)
    if request.mode == "data":
        tell_of_uncut(best)
    if request.mode == "data" or request.states is not None:
        tell_of_whole_states(best)
    if choice.ended:
        warn(cut_short(choice.ended, patience.seconds, best))
    return [
        Plan.of(
            candidate,
            mode=request.mode,
            limit=planner.request.limit,
            constraints=planner.constraints(
                candidate.captured, candidate.decisions.recompute, candidate.mesh
            ),
            alternatives=choice.alternatives,
            left_out=dict(choice.left_out),
            asked=choice.asked,
            dynamic=dynamic,
            strict=options.strict,
            progress=options.progress or False,
        )
        for candidate, planner in ways
    ]


def _with_slices(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any] | None, options: PlanOptions
) -> PlanOptions:
    """Return the options with the slices of tokens, and the micro-batches, that take least time.

    Slices are priced in a plan of whole sequences, for each number of micro-batches that is tried.
    """
    settings = dict(options.schedule_options or {})

    def sliced(count: int, slices: object) -> PlanOptions:
        schedule_options = {**settings, "slices": slices}
        return replace(options, microbatches=count, schedule_options=schedule_options)

    is_free = options.microbatches == "auto"
    plan = make_plan(model, args, kwargs, sliced(1 if is_free else int(options.microbatches), 1))
    plans, batch = [plan], batch_size(plan.original) or 1
    for count in range(2, _MOST_SEQUENCES + 1) if is_free else ():
        with suppress(InvalidInput):
            if batch % count == 0:
                plans.append(make_plan(model, args, kwargs, sliced(count, 1)))
    ways = []
    for plan in plans:
        assert plan.pipelining is not None
        best = SliceCosts.of(plan).best(len(plan.pipelining.stages), plan.microbatches)
        ways.append((best.seconds, plan.microbatches, best.lengths))
    _, count, lengths = min(ways)
    return sliced(count, lengths)


def _declared(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any] | None, options: PlanOptions
) -> DynamicShapes | None:
    """Return the sizes of the inputs that vary; None if none is declared to."""
    if options.dynamic_shapes is None:
        return None
    check_call(model, args, kwargs)
    return read_dynamic(model, args, kwargs or {}, options.dynamic_shapes)
