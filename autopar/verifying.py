"""verify(): is the parallel program the model's own? The plain model, the captured program and the
parallel program on the virtual mesh, trained side by side on copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.api import BackendName, parallelize
from autopar.capture import capture
from autopar.capture.containers import in_own_containers
from autopar.capture.execute import evaluate
from autopar.capture.failure import check_call
from autopar.capture.fake import own_copy
from autopar.capture.python_state import state_put_back
from autopar.capture.source import of_traceback
from autopar.capture.writes import put_between
from autopar.cluster import Cluster
from autopar.collectives import from_ranks
from autopar.errors import InvalidInput, error_text
from autopar.mesh import Mesh
from autopar.options import DynamicShapesLike, PlanOptions, RecomputeLike, ScheduleLike, StatesLike
from autopar.passes.microbatches import batch_statistics
from autopar.plan.plan import Plan, SavedPlan
from autopar.planner.patience import SECONDS
from autopar.planner.request import Mode
from autopar.planner.verdict import named_statistics
from autopar.precision import Precision
from autopar.runtime.backends.virtual_backend import VirtualGraph
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.initial_values import require_data
from autopar.strategies.node_info import info
from autopar.text.progress import Report
from autopar.text.units import counted
from autopar.verification.references import (
    CallArguments,
    CapturedModule,
    Difference,
    RunInputs,
    Tensors,
    TrainingResult,
    compare_training,
    first_different_module,
    run_step,
    seeded,
    to_double,
    train,
    train_module,
    value_difference,
)
from autopar.verification.rounding import measure_tolerances
from autopar.verification.tolerance import Tolerances
from autopar.verification.verification import Verification

RANKS = 4  # where neither mesh nor machines are given
FARTHEST = 2  # times the example's size, where a range goes on
_AFTER_FORWARD = Difference(
    "captured and parallel",
    "no value of forward; so backward, or the schedule",
    ("as captured", "as captured"),
    None,
)


def verify(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 3,
    plan: Plan | SavedPlan | None = None,
    backend: BackendName = "virtual",
    local_inputs: bool = False,
    check: bool = False,
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
) -> Verification:
    """Train the plain model, its captured program and the parallel program for a few `steps`.

    All start from `model`'s values, in float64 where the model can, and see the same batch; the
    model itself is not touched. With `dynamic_shapes` they do so at the example's sizes and at both
    ends of the range, on the example's numbers, repeated; where it has no end, or one beyond that,
    at twice the example's sizes. All else is as in `parallelize`; without mesh, cluster or plan
    four local ranks are planned for. The answer tells loss, gradients, buffers and parameters side
    by side, the sizes that were run, and for what differs the first value that does, with its
    source line.
    """
    if not isinstance(steps, int) or steps < 1:
        raise InvalidInput(
            "verify takes at least one step", got=f"steps={steps!r}", remedy="steps=3"
        )
    options = PlanOptions.among(locals())
    options.require_kinds()
    if backend != "virtual" or local_inputs:
        raise InvalidInput(
            "verify runs all ranks in this process, on the virtual mesh",
            got=f"backend={backend!r}, local_inputs={local_inputs!r}",
            remedy="leave it out: a plan gives the same numbers on every backend",
        )
    used = precision if plan is None else getattr(plan, "precision", None)
    if used is not None:
        raise InvalidInput(
            "verify compares programs in float64, where they round nothing away",
            got=f"a precision that {used}",
            remedy="leave the precision out: what a plan does with its layouts stays the same",
        )
    if mesh is None and cluster is None and plan is None:
        options = replace(options, cluster=Cluster.local(RANKS, measure=False))
    check_call(model, args, kwargs)
    require_data(
        model,
        (args, kwargs or {}),
        "verify, which trains copies of the model,",
        "a small model of the same kind with values; plan() needs none, and parallelize() makes "
        "them",
    )
    asked = {"plan": plan, "backend": backend, "check": check, **vars(options)}
    original, call, dtype = to_double(model, (args, kwargs or {}), keep_dtype=plan is not None)
    with state_put_back(original):
        found, made = _side_by_side(original, call, call, dtype, steps, asked)
    if made.dynamic is None:
        return found
    asked |= {"plan": made, **vars(PlanOptions())}
    done = [made.dynamic.require(original, *call)]
    sizes = [_named(done[0])]
    for wanted in (made.dynamic.planned, *made.dynamic.ends(FARTHEST)):
        if wanted in done:
            continue
        done.append(wanted)
        at, name = made.dynamic.repeated(wanted, original, *call), _named(wanted)
        try:
            with state_put_back(original):
                of_these, _ = _side_by_side(original, call, at, dtype, steps, asked)
        except PlainModelFailed as error:
            sizes.append(f"{name} not, where the plain model fails: {error.got}")
            continue
        found = found.with_sizes(of_these, name)
        sizes.append(name)
    return replace(found, sizes=tuple(sizes))


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{root} {size}" for root, size in sizes.items())


class PlainModelFailed(InvalidInput):
    """There is nothing to compare with."""


def _side_by_side(
    original: nn.Module,
    example: CallArguments,
    call: CallArguments,
    dtype: torch.dtype,
    steps: int,
    asked: Mapping[str, Any],
) -> tuple[Verification, Plan]:
    """All three on copies, at this call of what is parallelized with an example, as it is asked of
    `parallelize`; and the plan of the example."""
    plain, rate = _train_plain(own_copy(original), _again(call), steps)
    captured = capture(original, *call)
    second = own_copy(original)
    run = CapturedModule(second, captured)
    exported, _ = train_module(run, second, _again(call), steps, rate)
    tolerances = measure_tolerances(
        captured, RunInputs(original, _again(call), dtype), exported, rate
    )
    from_captured = compare_training(exported, plain, tolerances)
    differences: list[Difference | None] = []
    if any(row.differs for row in from_captured):
        differences.append(
            first_different_module(own_copy(original), captured, _again(call), tolerances)
        )
    with parallelize(own_copy(original), *example, **asked) as module:
        programs = module.programs
        plan = programs.program_for(*call, is_step=module.program.has_loss).plan
        outputs, difference = _forward(plan, original, _again(call), tolerances)
        trained = replace(_train_parallel(module, _again(call), steps, rate), outputs=outputs)
    if any(row.differs for row in compare_training(trained, exported, tolerances)):
        differences.append(difference or _of_statistics(plan) or _AFTER_FORWARD)
    found = Verification(
        module.plan.whole_mesh,
        _how(module.plan),
        dtype,
        tolerances.strict.relative,
        steps,
        tuple(from_captured),
        tuple(compare_training(trained, plain, tolerances)),
        tuple(one for one in differences if one is not None),
        has_loss=module.program.has_loss,
        draws=captured.key is not None,
    )
    return found, module.plan


def _again(call: CallArguments) -> CallArguments:
    """The same call with tensors of its own, to which forward may write."""
    made: dict[int, Tensor] = {}

    def own(one: Tensor) -> Tensor:
        fresh = one.detach().clone().requires_grad_(one.requires_grad)
        return made.setdefault(id(one), fresh)

    return pytree.tree_map_only(Tensor, own, call)


def _train_plain(model: nn.Module, call: CallArguments, steps: int) -> tuple[TrainingResult, float]:
    try:
        trained, rate = train_module(model, model, call, steps)
    except Exception as error:
        raise PlainModelFailed(
            "the plain model runs forward and backward, which the others are compared with",
            got=error_text(error),
            remedy="mend the model, or its inputs",
            source=of_traceback(error.__traceback__),
        ) from error
    if not all(loss.isfinite() for loss in trained.losses):
        raise PlainModelFailed(
            "the plain model's loss is a number, which the others are compared with",
            got=", ".join(f"{float(loss.real):.6g}" for loss in trained.losses) + ", step by step",
            remedy="mend the model, its initial values or its inputs",
        )
    return trained, rate


def _train_parallel(
    module: ParallelModule, call: CallArguments, steps: int, rate: float
) -> TrainingResult:
    def step() -> tuple[Tensor, Tensors]:
        if module.program.has_loss:
            args, kwargs = in_own_containers(call)
            return module.step(*args, **kwargs), {}
        return run_step(module, call)[0], {}

    def collect(values: Iterable[tuple[str, Tensor]]) -> Tensors:
        return module.backend.collect(dict(values))

    return train(module, step, module.full_grads, collect, steps=steps, rate=rate)[0]


def _forward(
    plan: Plan, model: nn.Module, call: CallArguments, tolerances: Tolerances
) -> tuple[Tensors, Difference | None]:
    """The outputs of the whole program, and its first value that is not the captured one's.

    In micro-batches the first one is run, which has no output but its share of the loss.
    """
    program, captured = plan.program, plan.captured
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, bounds in captured.bounds.items():
        named[name] = named[name].detach().clone()
        put_between(bounds, named[name])
    device = next((value.device for value in named.values()), torch.device("cpu"))
    with seeded(0):
        inputs = program.bind(*call, program.whole_shapes)
        assert inputs is not None
        inputs |= captured.draw(device)
    given = dict(program.split(inputs)[0])
    given |= {key: named[n] for key, n in (captured.parameters | captured.buffers).items()}
    expected: dict[str, Tensor] = {}
    of_value = tolerances.inside(captured.graph)
    outputs = {node.name: None for node in program.outputs}
    made: dict[str, Tensor] = {}
    found: list[Difference] = []

    def note(node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            expected[node.name] = value.detach()
        return value

    def look(node: fx.Node, values: list[Tensor]) -> None:
        compares = not found and node.name in expected
        if compares or node.name in outputs:
            type_ = info(node).type
            whole = from_ranks(values, type_.layout, plan.mesh, type_.shape).detach()
            made[node.name] = whole
            if compares:
                difference = value_difference(node, expected[node.name], whole, of_value[node.name])
                found.extend([difference] if difference else [])

    with seeded(0):
        evaluate(captured.graph, {**captured.constants, **given}, note)
    with seeded(0):
        VirtualGraph(program.graph, plan.mesh, device, captured.constants, look)(named, given)
    leaves = enumerate(captured.output_leaves)
    places = [str(index) for index, leaf in leaves if isinstance(leaf, fx.Node)]
    shown = {} if plan.batches else {p: made[n] for p, n in zip(places, outputs)}
    return shown, (found[0] if found else None)


def _of_statistics(plan: Plan) -> Difference | None:
    """What a plan asks of batch norm, if that is another than the plain model's."""
    statistics = batch_statistics(plan.original)
    if not statistics or plan.microbatches == 1:
        return None
    sides = "of the batch", f"of each of {counted(plan.microbatches, 'micro-batch')}"
    where = f"statistics of {named_statistics(statistics)}"
    return Difference("captured and parallel", where, sides, info(statistics[0]).source)


def _how(plan: Plan) -> str:
    """The schedule, the micro-batches and how much is cut, to stand behind the mesh."""
    schedule = f", {plan.pipelining.schedule.name}" if plan.pipelining else ""
    slices = f", {counted(plan.microbatches, 'micro-batch')}" if plan.microbatches > 1 else ""
    cut = sum(not layout.is_replicated for layout in plan.layouts.values())
    share = (
        f"{cut} of {counted(len(plan.layouts), 'value')} cut"
        if cut
        else "every rank runs all of it"
    )
    return f"{schedule}{slices}; {share}"
