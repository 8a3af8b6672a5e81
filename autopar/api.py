"""parallelize(): one call, from a model to a module that trains.

1. `validate` refuses contradictory options (admission.py, options.py).
2. `make_plans` (planning.py) captures the model and searches; the result is a `Plan`.
3. `plan.program` (plans/plan_value.py), on first use, runs the passes and splits stages.
4. `VirtualBackend` or `TorchBackend` (runtime/backends/) prepares this program.
5. `ParallelModule.step` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.admission import (
    RunOptions,
    device_of,
    validate_compiled_mesh,
    validate_example,
    validate_pieces,
    warn_about_virtual_mesh,
)
from autopar.candidates.patience import SECONDS
from autopar.capture import capture
from autopar.capture.failure import check_call
from autopar.capture.python_state import state_put_back
from autopar.capture.regions import repeated
from autopar.cluster import Cluster
from autopar.defaults import Mode
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.options import DynamicShapesLike, PlanOptions, RecomputeLike, ScheduleLike, StatesLike
from autopar.planning import make_plans
from autopar.plans.plan import Plan, SavedPlan
from autopar.plans.verdict import tell_of_statistics, warn
from autopar.precision import Precision
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.process_groups import enter_world, require_world_of
from autopar.runtime.backends.program_checks import ProgramChecks
from autopar.runtime.backends.virtual_backend import VirtualBackend
from autopar.runtime.backends.world import has_failed, world
from autopar.runtime.batches.batch_slices import require_even_slices
from autopar.runtime.batches.local_inputs import refuse_questions_about_slices
from autopar.runtime.execution.block_groups import Together
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.launching.failures import stop_all_on_failure
from autopar.runtime.module.call_outputs import OutputsLike
from autopar.runtime.module.parallel_module import RESERVED_NAMES, ParallelModule
from autopar.runtime.module.plan_broadcast import (
    Attach,
    agree_on_plan,
    broadcast_from_rank0,
    require_equal_plan,
    require_same_call,
)
from autopar.runtime.module.submodule_view import require_free_names
from autopar.runtime.module.trials import fastest_trial, run_trials
from autopar.runtime.parameters.initial_values import InitialValues, require_constants, require_data
from autopar.text.progress import Report, reporter

BackendName = Literal["virtual", "torch"]  # all ranks in this process, or this process is one


@torch.inference_mode(False)  # parameters made in inference mode could not be trained
def parallelize(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | SavedPlan | None = None,
    backend: BackendName | None = None,
    local_inputs: bool = False,
    outputs: OutputsLike = "whole",
    check: bool = False,
    compile: bool | Mapping[str, Any] = False,
    init: Callable[[nn.Module], object] | None = None,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    profile: int | None = None,
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
) -> ParallelModule:
    """Return a model as a parallel program that trains as the model does.

    All options must be equal on all ranks; a call that one rank refuses is refused on all.

    Values are those of rank 0's model, which sends each rank its pieces. What lies on the meta
    device is made on each rank, module by module, by `reset_parameters()` or
    `_init_weights(module)`, with the numbers that one device would draw from the same seed.

    Args:
        model: An ordinary module. It is not changed, and keeps its old values while the parallel
            module trains.
        args: The positional arguments of one global batch, as an example.
        kwargs: The keyword arguments of the same call.
        plan: A plan that `plan()` made, or one from a file. Options that decide something else are
            refused beside it. On several ranks rank 0's plan is used. Example:
            `ap.Plan.load("plan.json")`.
        backend: "virtual" runs all ranks in this process; "torch" makes this process one rank.
            None: "torch" under torchrun, else "virtual".
        local_inputs: Whether each rank brings its own slice of the batch, instead of all of it.
        outputs: What a call returns: "whole" tensors as the model does, or under torchrun
            "dtensor" or "local" (this rank's pieces), which spare a gather. A loss that is a mean
            of a rank's piece must then be divided by the number of pieces.
        check: Whether the first step is compared with the plain model, and on the virtual mesh
            every value with its replicas.
        compile: True, or options for `torch.compile`: each rank's program is compiled, forward and
            backward. Example: `{"mode": "reduce-overhead"}`.
        init: A function that fills the tensors of one module, as `model.apply(init)` would; for
            values on the meta device that no method of the module makes.
        weights: A safetensors file, a folder of them, or a mapping of names to tensors. Each rank
            reads its slices only.
        profile: Run a few steps of this many plans, the best by prediction, and take the fastest;
            `pm.plan.trials` has the times.
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
        An `nn.Module`. `step` trains; calling it gives what the model gives.
    """
    options, run_options = PlanOptions.from_arguments(locals()), RunOptions.from_arguments(locals())
    values = InitialValues(model, init, weights)
    return _ParallelizeCall(model, args, kwargs, plan, options, run_options, values).carry_out()


@dataclass(frozen=True)
class _ParallelizeCall:
    """One call of `parallelize`, with its options."""

    model: nn.Module
    args: tuple
    kwargs: Mapping[str, Any] | None
    plan: Plan | SavedPlan | None  # None: one is made by these options
    options: PlanOptions
    run_options: RunOptions
    values: InitialValues
    compilers: dict[int, RegionCompiler] = field(default_factory=dict)  # by the program

    def carry_out(self) -> ParallelModule:
        is_rank = dist.is_initialized() or dist.is_torchelastic_launched() or has_failed()
        run_options = self.run_options
        default = "torch" if is_rank else "virtual"
        backend_name = run_options.backend if run_options.backend is not None else default
        if backend_name == "virtual" or not is_rank:
            self.validate(backend_name)
        if backend_name == "virtual":
            device = device_of(self.model)
            plan = self.select_plan(self.make_plans_and_warn(), backend_name, device)
            if run_options.backend is None and plan.whole_mesh.size > 1:
                warn_about_virtual_mesh()
            compiler = self.compiler_for(plan, device)
            backend: Backend = VirtualBackend(
                plan.program, device, check=run_options.check, compiler=compiler
            )
            return self.build_module(plan, backend)
        device = enter_world(device_of(self.model))
        with stop_all_on_failure(agreed=True):
            options = replace(run_options, backend=backend_name).comparable
            require_same_call(lambda: self.validate(backend_name), **options)
            self.values.rank0_facts = broadcast_from_rank0(self.values.rank0_facts)
            plan = self.select_plan(self.agree_on_plans(), backend_name, device)
        with stop_all_on_failure():
            backend = TorchBackend(
                plan.program,
                device,
                local_inputs=run_options.local_inputs,
                outputs=run_options.outputs,
                compiler=self.compiler_for(plan, device),
            )
            return self.build_module(plan, backend)

    def make_plans_here(self, plan: Plan | SavedPlan | None) -> list[Plan]:
        """Return the plans that this process chooses from, by itself: `plan`, if there is one."""
        self.values.accept()
        if plan is None:
            profile = self.run_options.profile
            plans = make_plans(self.model, self.args, self.kwargs, self.options, profile)
        else:
            plans = [plan.attach(self.model, self.args, self.kwargs)]
        require_constants(plans[0].original)
        return plans

    def make_plans_and_warn(self) -> list[Plan]:
        """Like `make_plans_here`, but a finished plan gives the warnings that a new one gives."""
        plans = self.make_plans_here(self.plan)
        if self.plan is not None:
            tell_of_statistics(plans[0].original, plans[0].microbatches)
        return plans

    def agree_on_plans(self) -> list[Plan]:
        """Return the plans that rank 0 decides, on all ranks."""
        if dist.get_world_size() == 1:
            return self.make_plans_and_warn()
        plans: list[Plan] = []

        def first() -> Plan:
            plans.extend(self.make_plans_and_warn())
            return plans[0]

        best = agree_on_plan(first, self.prepare_to_follow)
        others = broadcast_from_rank0(len(plans)) - 1 if self.run_options.profile is not None else 0

        def prepare_next() -> Attach:
            return lambda saved: saved.attach_captured(best.original)

        numbers = range(1, 1 + others)
        return [
            best,
            *(agree_on_plan(partial(plans.__getitem__, at), prepare_next) for at in numbers),
        ]

    def prepare_to_follow(self) -> Attach:
        """Capture the model while rank 0 plans; return what attaches the plan of rank 0 to it."""
        if self.plan is not None:
            return partial(require_equal_plan, self.make_plans_here(self.plan)[0])
        if self.options.dynamic_shapes is not None:  # captured at the sizes that rank 0 planned
            return lambda first: self.make_plans_here(first)[0]
        self.values.accept()
        captured = capture(self.model, self.args, self.kwargs, self.options.precision)
        require_constants(captured)
        return lambda first: first.attach_compared(captured)

    def select_plan(self, plans: list[Plan], backend_name: str, device: torch.device) -> Plan:
        """Return the fastest plan that can run with these options, predicted or measured."""
        runnable: list[Plan] = []
        for plan in plans:
            try:
                self.require_runnable(plan, backend_name)
                runnable.append(plan)
            except InvalidInput:
                if plan is plans[-1] and not runnable:
                    raise
        if self.run_options.profile is None:
            return runnable[0]

        def build(plan: Plan) -> ParallelModule:
            program, compiler = plan.program, self.compiler_for(plan, device)
            backend: Backend = VirtualBackend(program, device, compiler=compiler)
            if backend_name == "torch":
                backend = TorchBackend(program, device, compiler=compiler)
            return ParallelModule(self.model, plan.program, plan, backend, values=self.values)

        ranks = world() if backend_name == "torch" else None
        speaks = ranks is None or ranks.rank == 0
        progress = reporter(self.options.progress if speaks else False)
        with progress as report, state_put_back(self.model):
            trials = run_trials(
                runnable,
                build,
                args=self.args,
                kwargs=self.kwargs,
                report=report,
                world=ranks,
                device=device,
            )
        number, ordered = fastest_trial(trials), sorted(trials, key=lambda trial: trial.order)
        for trial in ordered:
            if trial.why and speaks:
                warn(f"of the plans that were run, one is left out: {trial}")
        return runnable[number].with_trials(tuple(ordered))

    def require_runnable(self, plan: Plan, backend_name: str) -> None:
        """Refuse a plan that cannot run with these options."""
        run_options = self.run_options
        if run_options.compile and plan.pipelining and plan.pipelining.schedule.slices:
            raise InvalidInput(
                "the programs of token slices run eagerly: attention adds to what they share",
                got=f"compile={run_options.compile!r} with {plan.pipelining.schedule.name}",
                remedy="compile=False, or another schedule",
            )
        if backend_name == "virtual":
            validate_compiled_mesh(backend_name, run_options.compile, plan.whole_mesh)
            return
        require_world_of(plan.whole_mesh)
        stages = () if plan.pipelining is None else plan.pipelining.stages
        validate_pieces(run_options.outputs, len(stages))
        if run_options.local_inputs:
            refuse_questions_about_slices(plan)
        if run_options.local_inputs and plan.batches is not None:
            require_even_slices(plan.program)

    def build_module(self, plan: Plan, backend: Backend) -> ParallelModule:
        on_processes = not isinstance(backend, VirtualBackend)
        checks = None
        if self.run_options.check:
            checks = ProgramChecks(self.model, plan.original, on_processes=on_processes)
        return ParallelModule(
            self.model, plan.program, plan, backend, check=checks, values=self.values
        )

    def compiler_for(self, plan: Plan, device: torch.device) -> RegionCompiler | None:
        """Return the compiler of a plan's programs; None unless `compile` asks for it."""
        compile = self.run_options.compile
        if isinstance(compile, bool) and not compile:
            return None
        if (key := id(plan.program)) not in self.compilers:
            options = {} if isinstance(compile, bool) else compile
            together = Together(plan.mesh, plan.states.buffer_bytes)
            blocks = repeated(plan.original)
            self.compilers[key] = RegionCompiler(options, device, blocks, together)
        return self.compilers[key]

    def validate(self, backend_name: str) -> None:
        """Refuse a call that this process sees to be wrong."""
        self.run_options.validate(backend_name, self.plan, device_of(self.model))
        inputs = (v for v in (self.args, self.kwargs) if v is not None)
        is_empty = all(isinstance(value, tuple | Mapping) and not value for value in inputs)
        if self.plan is None or not is_empty:  # a plan knows its own inputs
            check_call(self.model, self.args, self.kwargs)
        require_free_names(self.model, RESERVED_NAMES)
        self.values.validate()
        if self.run_options.check:
            require_data(
                self.model, (), "check=True, which compares with the plain model,", "check=False"
            )
        if self.run_options.profile is not None:
            validate_example(self.args, self.kwargs)
        if self.plan is not None:
            self.options.refuse_beside_plan()
