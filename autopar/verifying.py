"""verify(): a check that a parallel program computes what its model computes.

The plain model, the captured program and the parallel program on the virtual mesh are trained side
by side on copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.api import BackendName, parallelize
from autopar.candidates.patience import SECONDS
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
from autopar.defaults import VERIFIED_RANKS, Mode
from autopar.errors import InvalidInput, error_text
from autopar.mesh import Mesh
from autopar.options import DynamicShapesLike, PlanOptions, RecomputeLike, ScheduleLike, StatesLike
from autopar.passes.microbatches import batch_statistics
from autopar.plans.plan import Plan, SavedPlan
from autopar.plans.verdict import named_statistics
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
) -> Verification:
    """Train the plain model, its captured program and the parallel program, and compare them.

    All start from `model`'s values, in float64 if the model can, and see the same batch. The model
    itself is not touched. All ranks run in this process, whatever the plan.

    Args:
        model: An ordinary module with values.
        args: The positional arguments of one global batch.
        kwargs: The keyword arguments of the same call.
        steps: The number of optimizer steps. Default: 3.
        plan: A plan to verify, from `plan()` or from a file. None: one is made by the options.
        backend: "virtual", the only backend that `verify` runs on.
        local_inputs: False, since one process has the whole batch.
        check: Whether the first step is also compared value by value, as in `parallelize`.
        cluster: The machines. None: four local ranks, unless `mesh` or `plan` is given.
        dynamic_shapes: Which dims of the inputs vary, as in `plan`. The programs then also run at
            both ends of the range, on the example's numbers, repeated. An end that is missing or
            far away becomes twice the example's size.

    All other arguments are those of `plan`, with its defaults.

    Returns:
        A `Verification`: loss, gradients, buffers and parameters side by side, the sizes that were
        run, and the first value that differs, with its source line. `ok` says whether all agree.
    """
    if not isinstance(steps, int) or steps < 1:
        raise InvalidInput(
            "verify takes at least one step", got=f"steps={steps!r}", remedy="steps=3"
        )
    options = PlanOptions.from_arguments(locals())
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
        options = replace(options, cluster=Cluster.local(VERIFIED_RANKS, measure=False))
    check_call(model, args, kwargs)
    require_data(
        model,
        (args, kwargs or {}),
        "verify, which trains copies of the model,",
        "a small model of the same kind with values; plan() needs none, and parallelize() makes "
        "them",
    )
    parallel = {"plan": plan, "backend": backend, "check": check, **vars(options)}
    original, call, dtype = to_double(model, (args, kwargs or {}), keep_dtype=plan is not None)
    compared = _ComparedModel(original, call, dtype, steps, parallel)
    with state_put_back(original):
        verification, verified = _compare_at(compared, call)
    dynamic = verified.dynamic
    if dynamic is None:
        return verification
    compared = replace(compared, options=parallel | {"plan": verified, **vars(PlanOptions())})
    done = [dynamic.require(original, *call)]
    names = [_sizes_text(done[0])]
    for sizes in (dynamic.planned, *dynamic.ends(FARTHEST)):
        if sizes in done:
            continue
        done.append(sizes)
        name = _sizes_text(sizes)
        try:
            with state_put_back(original):
                other, _ = _compare_at(compared, dynamic.repeated(sizes, original, *call))
        except PlainModelFailed as error:
            names.append(f"{name} not, where the plain model fails: {error.got}")
            continue
        verification = verification.with_sizes(other, name)
        names.append(name)
    return replace(verification, sizes=tuple(names))


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{root} {size}" for root, size in sizes.items())


class PlainModelFailed(InvalidInput):
    """A plain model that fails by itself, so that there is nothing to compare with."""


@dataclass(frozen=True)
class _ComparedModel:
    """A model and the options of its parallel program, to be compared at several calls."""

    original: nn.Module
    example: CallArguments  # that it is parallelized with
    dtype: torch.dtype
    steps: int
    options: Mapping[str, Any]  # of `parallelize`


def _compare_at(compared: _ComparedModel, call: CallArguments) -> tuple[Verification, Plan]:
    """Train all three programs on copies at a call; return also the plan of the example."""
    original, dtype, steps = compared.original, compared.dtype, compared.steps
    plain, rate = _train_plain(own_copy(original), _fresh_tensors(call), steps)
    captured = capture(original, *call)
    second = own_copy(original)
    run = CapturedModule(second, captured)
    exported, _ = train_module(run, second, _fresh_tensors(call), steps, rate)
    inputs = RunInputs(original, _fresh_tensors(call), dtype)
    tolerances = measure_tolerances(captured, inputs, exported, rate)
    from_captured = compare_training(exported, plain, tolerances)
    differences: list[Difference | None] = []
    if any(row.differs for row in from_captured):
        differences.append(
            first_different_module(own_copy(original), captured, _fresh_tensors(call), tolerances)
        )
    with parallelize(own_copy(original), *compared.example, **compared.options) as module:
        if steps > 1 and module.program.schedule.delays:
            raise InvalidInput(
                "verify compares a plan with the model's own training, from which an asynchronous "
                "schedule departs with the second step",
                got=f"steps={steps}, schedule={module.program.schedule.name!r}",
                remedy="steps=1",
            )
        programs = module.programs
        plan = programs.program_for(*call, is_step=module.program.has_loss).plan
        outputs, difference = _forward(plan, original, _fresh_tensors(call), tolerances)
        trained = _train_parallel(module, _fresh_tensors(call), steps, rate)
        trained = replace(trained, outputs=outputs)
    if any(row.differs for row in compare_training(trained, exported, tolerances)):
        differences.append(difference or _statistics_difference(plan) or _AFTER_FORWARD)
    verification = Verification(
        module.plan.whole_mesh,
        _how_it_runs(module.plan),
        dtype,
        tolerances.strict.relative,
        steps,
        tuple(from_captured),
        tuple(compare_training(trained, plain, tolerances)),
        tuple(difference for difference in differences if difference is not None),
        has_loss=module.program.has_loss,
        draws=captured.key is not None,
    )
    return verification, module.plan


def _fresh_tensors(call: CallArguments) -> CallArguments:
    """Return a copy of a call with new tensors, to which forward may write."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        fresh = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies.setdefault(id(tensor), fresh)

    return pytree.tree_map_only(Tensor, copied, call)


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
    """Return the outputs of the whole program, and its first value that differs from the captured.

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
    values = dict(program.split(inputs)[0])
    values |= {key: named[n] for key, n in (captured.parameters | captured.buffers).items()}
    expected: dict[str, Tensor] = {}
    of_value = tolerances.inside(captured.graph)
    outputs = {node.name: None for node in program.outputs}
    computed: dict[str, Tensor] = {}
    differing: list[Difference] = []

    def note(node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            expected[node.name] = value.detach()
        return value

    def look(node: fx.Node, pieces: list[Tensor]) -> None:
        compares = not differing and node.name in expected
        if compares or node.name in outputs:
            type_ = info(node).type
            whole = from_ranks(pieces, type_.layout, plan.mesh, type_.shape).detach()
            computed[node.name] = whole
            if compares:
                difference = value_difference(node, expected[node.name], whole, of_value[node.name])
                differing.extend([difference] if difference else [])

    with seeded(0):
        evaluate(captured.graph, {**captured.constants, **values}, note)
    with seeded(0):
        run = VirtualGraph(program.graph, plan.mesh, device, captured.constants, watch=look)
        run(named, values)
    leaves = enumerate(captured.output_leaves)
    places = [str(index) for index, leaf in leaves if isinstance(leaf, fx.Node)]
    shown = {} if plan.batches else {p: computed[n] for p, n in zip(places, outputs)}
    return shown, (differing[0] if differing else None)


def _statistics_difference(plan: Plan) -> Difference | None:
    """Return the difference that batch norm makes over micro-batches, if the plan has several."""
    statistics = batch_statistics(plan.original)
    if not statistics or plan.microbatches == 1:
        return None
    sides = "of the batch", f"of each of {counted(plan.microbatches, 'micro-batch')}"
    where = f"statistics of {named_statistics(statistics)}"
    return Difference("captured and parallel", where, sides, info(statistics[0]).source)


def _how_it_runs(plan: Plan) -> str:
    """Return the schedule, the micro-batches and how much is cut, as words behind the mesh."""
    schedule = f", {plan.pipelining.schedule.name}" if plan.pipelining else ""
    slices = f", {counted(plan.microbatches, 'micro-batch')}" if plan.microbatches > 1 else ""
    cut = sum(not layout.is_replicated for layout in plan.layouts.values())
    alone = "every rank runs all of its stage" if plan.pipelining else "every rank runs all of it"
    share = f"{cut} of {counted(len(plan.layouts), 'value')} cut" if cut else alone
    return f"{schedule}{slices}; {share}"
