"""plan(): the decisions about a model on some machines, without running anything."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import capture
from autopar.capture.annotations import parameter_annotations, stage_pins
from autopar.capture.captured import Captured
from autopar.capture.listing import operator_of
from autopar.cluster import Cluster
from autopar.collectives import LinkPrice, Price
from autopar.cost.footprint import program_memory
from autopar.cost.price import ClusterPrice
from autopar.errors import InvalidInput
from autopar.lines import frames_to_caller
from autopar.mesh import Mesh
from autopar.passes import rewrite
from autopar.passes.microbatches import batch_statistics
from autopar.pipeline.schedule import Schedule
from autopar.plan.plan import Plan
from autopar.planner.choose import choose
from autopar.planner.request import Request, ScheduleLike, open_request, pipeline_axis, read_request
from autopar.progress import reporter
from autopar.search.auto import Found, Progress, search
from autopar.search.constraints import Constraints, read_constraints
from autopar.search.decisions import Decisions, Fallback
from autopar.search.propagate import propagate
from autopar.strategies.node_info import info

MODES = ("auto", "propagate", "data")


def plan(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    mode: str = "auto",
    memory: float | None = None,
    strict: bool = False,
    microbatches: int | str = "auto",
    pipeline: str | int | None = "auto",
    schedule: ScheduleLike = "auto",
    schedule_options: Mapping[str, Any] | None = None,
    recompute: bool = False,
    progress: Progress | bool | None = None,
) -> Plan:
    """Decide where every tensor of `model`, called with `args` and `kwargs`, lives.

    `cluster`: the machines; this one if not given. `mesh`: its axes; all are tried if not given.
    `mode`: "auto" searches for the least predicted time, "propagate" spreads the annotations,
    "data" cuts the batch. `memory`: bytes on each device, if less than it has. `strict`: refuse
    operators without rules. `microbatches`: into how many equal parts a step cuts the batch, to run
    one after another ("auto" keeps it whole where batch norm would make parts another loss).
    `pipeline`: the axis of a pipeline ("auto": `pp`, if the mesh has it; without a mesh, what such
    an axis shall be called), a number of ranks, or None for no pipeline; `schedule`: a name, a
    mapping with a name and options, or a schedule, as `ap.pipeline.load("mine.csv")` reads one;
    `recompute`: run each stage's forward again before its backward. Without a mesh, or with a
    pipeline whose schedule is "auto", mode="auto" weighs stages, micro-batches and schedules by
    simulation, and recomputation where they do not fit into memory. `progress` is told of each
    phase of a search and its detail; True shows them, False is silent, None shows them on a
    terminal.
    """
    mesh = _checked(mode, mesh, microbatches)
    count = None if microbatches == "auto" else int(microbatches)
    if _is_open(mode, mesh, pipeline, schedule):
        _require_nothing_about_a_schedule(schedule_options, recompute)
        request = open_request(mesh, pipeline, count)
    else:
        request = read_request(mesh, pipeline, schedule, schedule_options, count, recompute)
    with reporter(progress) as report:
        report("capture", type(model).__name__)
        captured = capture(model, args, dict(kwargs or {}))
        if strict:
            _require_rules(captured)
        if request.schedule is not None and count is None and not isinstance(schedule, Schedule):
            request = _in_one_if_statistics(captured, request, schedule_options, schedule)
        if request.mesh is not None:
            turns = request.microbatches or 1
            _refuse_random(captured, request.mesh, turns, request.recompute)
        if cluster is None:
            devices = request.mesh.size if request.mesh else _devices_here()
            cluster = Cluster.local(devices, measure=False)
        limit = cluster.device.memory if memory is None else memory
        layouts = _Layouts(cluster, mode, parameter_annotations(model), report)
        chosen = choose(
            captured,
            cluster,
            layouts,
            request,
            memory=math.inf if mode != "auto" and memory is None else limit,
            pins=stage_pins(model),
            progress=report,
        )
    decisions, pipelining = chosen.found.decisions, chosen.pipelining
    slices = chosen.batches.count if chosen.batches else 1
    whole = pipelining.mesh if pipelining else decisions.mesh
    _refuse_random(captured, whole, slices, pipelining is not None and pipelining.recompute)
    _report_statistics(captured, slices)
    _report_fallbacks(decisions.fallbacks)
    return Plan(
        chosen.captured,
        decisions,
        ClusterPrice(cluster, decisions.mesh),
        cluster,
        chosen.found.search,
        chosen.batches,
        pipelining,
        mode=mode,
        limit=limit,
        constraints=layouts.constraints(chosen.captured, decisions.mesh),
        alternatives=chosen.alternatives,
    )


@dataclass(frozen=True)
class _Layouts:
    """Where tensors live: by search, or spread from annotations or the batch."""

    cluster: Cluster
    mode: str
    annotations: Mapping[str, Any]
    report: Progress

    def constraints(self, program: Captured, mesh: Mesh) -> Constraints:
        """What annotations ask for."""
        return (
            Constraints()
            if self.mode == "data"
            else read_constraints(program, mesh, self.annotations)
        )

    def __call__(
        self,
        program: Captured,
        offered: Sequence[Mesh],
        memory: float,
        microbatches: int,
        is_all: bool,
    ) -> Found:
        if self.mode != "auto":
            mesh = offered[0]
            constraints = None if self.mode == "data" else self.constraints(program, mesh)
            return Found(propagate(program, mesh, constraints))

        def needed(decisions: Decisions) -> float:
            price = ClusterPrice(self.cluster, decisions.mesh)
            graph = rewrite(program, decisions, price)
            return program_memory(graph, decisions.mesh).peak

        return search(
            program,
            offered,
            self.cluster,
            lambda mesh: self.constraints(program, mesh),
            memory,
            self.report,
            needed if is_all else None,
            microbatches,
        )


def _checked(mode: str, mesh: Mesh | DeviceMesh | None, microbatches: int | str) -> Mesh | None:
    """The mesh, when these are what they have to be."""
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


def _is_open(
    mode: str,
    mesh: Mesh | None,
    pipeline: str | int | None,
    schedule: ScheduleLike,
) -> bool:
    """Whether there is a choice between pipelines: then they are weighed by simulation."""
    if mode != "auto" or pipeline is None:
        return False
    if mesh is None:
        return schedule in ("auto", None)
    axis, _ = pipeline_axis(mesh, pipeline)
    return axis is not None and schedule in ("auto", None)


def _in_one_if_statistics(
    captured: Captured,
    request: Request,
    options: Mapping[str, Any] | None,
    schedule: ScheduleLike,
) -> Request:
    """The request with one micro-batch, where more, which nobody asked for, change the loss."""
    statistics = batch_statistics(captured)
    if not statistics:
        return request
    name = None if schedule == "auto" else schedule
    with suppress(InvalidInput):
        one = read_request(request.mesh, request.axis, name, options, 1, request.recompute)
        if one.microbatches == 1:
            return one
    made = request.schedule
    assert made is not None
    raise InvalidInput(
        "micro-batches that change what a step computes are taken only when asked for",
        got=f"schedule {made.name!r}, which needs several, and {_named(statistics)}, "
        "which would take statistics over each alone",
        remedy=f"microbatches={made.microbatches}, or another schedule",
        source=info(statistics[0]).source,
    )


def _require_nothing_about_a_schedule(options: Mapping[str, Any] | None, recompute: bool) -> None:
    """Where schedules are weighed, so are their options, and whether stages recompute."""
    given = {"schedule_options": options, "recompute": recompute}
    named = [f"{name}={value!r}" for name, value in given.items() if value]
    if named:
        raise InvalidInput(
            "options and recompute need the name of the schedule that they are for",
            got=", ".join(named),
            remedy='schedule="chimera" or another name, beside them',
        )


def _devices_here() -> int:
    """How many devices this process can count on: its world, its GPUs, or its cores."""
    if dist.is_initialized():
        return dist.get_world_size()
    if dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() or os.cpu_count() or 1


def price_of(mesh: Mesh) -> Price:
    """What movements cost on links of one kind."""
    return LinkPrice.uniform(mesh)


def _require_rules(captured: Captured) -> None:
    missing = [
        f"{operator_of(node)} at {info(node).source}"
        for node in captured.operators
        if captured.rules[node.name] is None
    ]
    if missing:
        raise InvalidInput(
            "with strict=True every operator has a rule",
            got="\n".join(dict.fromkeys(missing)),
            remedy="register_rule(operator, '... -> ...') for each, or strict=False to run them "
            "replicated",
        )


def _refuse_random(captured: Captured, mesh: Mesh, slices: int, again: bool) -> None:
    """Refuse random numbers where several ranks, or several runs of a step, would draw them."""
    if mesh.size == slices == 1 and not again:
        return
    places = "" if mesh.size == 1 else f" on {mesh}"
    turns = "" if slices == 1 else f" in {slices} micro-batches"
    for node in captured.random:
        raise InvalidInput(
            "a random operator runs on one rank only: its bits would depend on the layout",
            got=f"{operator_of(node)} in {info(node).module or 'the model'}{places}{turns}",
            remedy="set its probability to 0 (or call model.eval() for it), or draw outside of "
            "forward and hand the numbers over as an input",
            source=info(node).source,
        )


def _report_statistics(captured: Captured, slices: int) -> None:
    """Say what micro-batches change, where a user has asked for them."""
    statistics = batch_statistics(captured) if slices > 1 else ()
    if statistics:
        message = (
            f"{_named(statistics)} takes its statistics over each of {slices} micro-batches, not "
            "over the batch: loss, gradients and running statistics are not those of microbatches=1"
        )
        warnings.warn(message, stacklevel=frames_to_caller())


def _named(statistics: Sequence[fx.Node]) -> str:
    """Batch norms by their modules."""
    names = list(dict.fromkeys(info(node).module or "the model" for node in statistics))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"batch norm ({', '.join(names[:3])}{more})"


def _report_fallbacks(fallbacks: tuple[Fallback, ...]) -> None:
    for operator, count in Counter(fallback.operator for fallback in fallbacks).items():
        first = next(fallback for fallback in fallbacks if fallback.operator == operator)
        message = (
            f"{operator} has no rule and runs replicated ({count} times, first at "
            f"{first.source}); register_rule() gives it one"
        )
        warnings.warn(message, stacklevel=frames_to_caller())
