"""The checks that a call of `plan` or `parallelize` passes before it is carried out.

Each function refuses one contradiction with the rule, the options and a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from autopar._torch.compiler import COMPILER_OPTIONS, missing_cpp_compiler
from autopar.base.schema import is_count
from autopar.candidates.request import Request
from autopar.capture.captured import Captured
from autopar.capture.fake import has_no_data
from autopar.errors import InvalidInput, require_one_of
from autopar.mesh import Mesh
from autopar.options import OptionKind, PlanOptions, read_request
from autopar.passes.microbatches import batch_statistics
from autopar.pipeline.schedule import Schedule
from autopar.plans.plan import Plan, SavedPlan
from autopar.plans.verdict import named_statistics, refuse_random, require_rules, warn
from autopar.runtime.module.call_outputs import OUTPUT_FORMS, OutputsLike
from autopar.strategies.node_info import info
from autopar.text.units import counted


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU for meta devices, or for no model."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))


PLAN = OptionKind(
    "what plan() made, or one from a file",
    lambda value: isinstance(value, Plan | SavedPlan | None),
    'ap.Plan.load("plan.json")',
)


@dataclass(frozen=True)
class RunOptions:
    """The options of `parallelize` that say how a program runs."""

    backend: str | None
    local_inputs: bool
    outputs: OutputsLike
    check: bool
    compile: bool | Mapping[str, Any]
    profile: int | None = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> RunOptions:
        """Pick these options from `locals()` of the public function that declares them all."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def comparable(self) -> dict[str, Hashable]:
        """The options in a form in which ranks compare them."""
        return {field.name: comparable_option(getattr(self, field.name)) for field in fields(self)}

    def validate(self, backend_name: str, plan: object, device: torch.device) -> None:
        """Refuse options that one process sees to be wrong, on a backend."""
        validate_running(backend_name, plan, local_inputs=self.local_inputs, check=self.check)
        validate_profile(self.profile, plan)
        validate_outputs(backend_name, self.outputs)
        validate_compile(self.compile, device)


def comparable_option(value: object) -> Hashable:
    """Return an option in a form that is equal for equal options, whatever their addresses."""
    return value if isinstance(value, bool | str | None) else _text(value)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = sorted((repr(key), _text(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {text}' for key, text in pairs)}}}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


BACKENDS = {
    "virtual": "all ranks in this process",
    "torch": "torch.distributed, over NCCL on GPUs and gloo on CPUs",
}


def validate_running(backend_name: str, plan: object, *, local_inputs: bool, check: bool) -> None:
    """Refuse a way to run a program that contradicts itself."""
    require_one_of("backend", backend_name, BACKENDS)
    PLAN("plan", plan)
    if backend_name == "virtual" and local_inputs:
        raise InvalidInput(
            "local inputs are those of one process of several",
            got='local_inputs=True with backend="virtual"',
            remedy="hand the global batch to the virtual mesh",
        )
    if local_inputs and check:
        raise InvalidInput(
            "what is checked is the global batch, which every rank is given",
            got="local_inputs=True with check=True",
            remedy="one of them",
        )


PROFILE = OptionKind(
    "a number of plans to run, from 1, or None",
    lambda value: value is None or is_count(value),
    "10",
)


def validate_profile(profile: object, plan: object) -> None:
    """Refuse a number that is none, and a choice among plans where one was given."""
    PROFILE("profile", profile)
    if profile is not None and plan is not None:
        raise InvalidInput(
            "profile= runs some plans to choose one, and a finished plan leaves no choice",
            got=f"plan= together with profile={profile}",
            remedy="one of them; pm.on_step(...) tells what steps of a given plan take",
        )


def validate_example(args: tuple, kwargs: Mapping[str, Any] | None) -> None:
    """Refuse example inputs of which no step can be run."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and has_no_data(value):
            raise InvalidInput(
                "profile= runs steps with the example inputs, which have data",
                got=f"one of {list(value.shape)} without data, on the {value.device.type} device",
                remedy="give a real batch",
            )


def require_loss(captured: Captured, profile: int) -> None:
    """Refuse to run steps of a model whose loss is made outside of it, before it is planned."""
    try:
        _ = captured.loss_index
    except InvalidInput as error:
        raise InvalidInput(
            "profile= runs whole steps with the loss that the model returns: one differentiable "
            "number, or one called 'loss', or the first of a tuple",
            got=f"profile={profile} of a model with {error.got}",
            remedy="return the loss from forward, or leave profile= out, which takes the plan "
            "that is predicted fastest",
        ) from None


def validate_outputs(backend_name: str, outputs: object) -> None:
    """Refuse pieces of outputs where one process has all of them."""
    require_one_of("outputs", outputs, OUTPUT_FORMS)
    if backend_name == "virtual" and outputs != "whole":
        raise InvalidInput(
            "pieces of outputs are those of one process of several",
            got=f'outputs={outputs!r} with backend="virtual"',
            remedy='outputs="whole", which the virtual mesh always gives',
        )


def validate_pieces(outputs: str, stages: int) -> None:
    """Refuse pieces of outputs where few ranks make them."""
    if outputs != "whole" and stages:
        raise InvalidInput(
            "outputs of a pipeline are whole: some ranks make them, and send them to all",
            got=f"outputs={outputs!r} with a program in {counted(stages, 'stage')}",
            remedy='outputs="whole", or pipeline=None',
        )


COMPILED = OptionKind(
    "True, False or options of torch.compile by name",
    lambda value: (
        isinstance(value, bool)
        or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    ),
    'True, or {"mode": "max-autotune-no-cudagraphs"}',
)


def validate_compile(compile: object, device: torch.device) -> None:
    """Refuse options with which nothing can be compiled for a device."""
    COMPILED("compile", compile)
    if isinstance(compile, bool) and not compile:
        return
    options = dict(compile) if isinstance(compile, Mapping) else {}
    if unknown := options.keys() - COMPILER_OPTIONS:
        raise InvalidInput(
            f"compile= takes these options of torch.compile: {', '.join(COMPILER_OPTIONS)}",
            got=", ".join(sorted(unknown)),
            remedy='those of its compiler go under "options"',
        )
    try:
        torch.compile(**options)(lambda: None)
    except Exception as error:
        raise InvalidInput(
            "torch.compile takes the options that compile= has for it",
            got=f"{options}: {str(error).partition(chr(10))[0]}",
            remedy="compile=True, or other options",
        ) from None
    if device.type == "cpu" and options.get("backend", "inductor") == "inductor":
        missing = missing_cpp_compiler()
        if missing is not None:
            raise InvalidInput(
                "compiling for a CPU takes a C++ compiler",
                got=missing,
                remedy="install one (g++ or clang++), or name it by the variable CXX; or "
                'compile=False, or {"backend": "aot_eager"}, which compiles to calls of torch',
            )


def validate_compiled_mesh(backend_name: str, compile: object, mesh: Mesh) -> None:
    """Refuse to compile for a virtual mesh of several ranks, which runs on lists of tensors."""
    if compile is not False and backend_name == "virtual" and mesh.size > 1:
        raise InvalidInput(
            "what is compiled is the program of one rank, and the virtual mesh runs all of them "
            "call by call",
            got=f"compile={compile!r} on the virtual {mesh}",
            remedy="compile=False there; start the ranks as processes (torchrun) to compile, or "
            "take a mesh of one rank",
        )


def admit(captured: Captured, request: Request, options: PlanOptions) -> Request:
    """Return the request for this very program, or refuse it."""
    if options.strict:
        require_rules(captured)
    statistics = batch_statistics(captured)
    if statistics and options.microbatches == "auto" and not isinstance(options.schedule, Schedule):
        request = _in_one_microbatch(statistics, request, options)
    elif not captured.has_loss and options.microbatches == "auto" and options.schedule == "auto":
        request = _without_loss(request, options)
    if request.mesh is not None:
        refuse_random(captured, request.mesh, request.microbatches or 1)
    return request


@cache
def warn_about_virtual_mesh() -> None:
    """Warn once in a process that other devices of this machine do not compute."""
    devices = torch.accelerator.device_count()
    if devices > 1:
        warn(
            "all ranks run in this process, one after another, on the virtual mesh: torchrun "
            f"--nproc-per-node {devices} gives each of the {devices} devices here a rank; "
            'backend="virtual" says that one process is meant'
        )


def _without_loss(request: Request, options: PlanOptions) -> Request:
    """Remove stages and micro-batches that nobody asked for from a request: they need the loss."""
    if options.mesh is not None and request.axis is not None:
        return request
    if options.mesh is None and options.pipeline not in ("auto", None):
        return request
    return replace(request, axis=None, stages=1, microbatches=1)


def _in_one_microbatch(
    statistics: Sequence[fx.Node], request: Request, options: PlanOptions
) -> Request:
    """Return the request with one micro-batch: more, which nobody asked for, change the loss."""
    with suppress(InvalidInput):
        uncut = read_request(replace(options, microbatches=1))
        if uncut.microbatches == 1:
            return uncut
    schedule = request.schedule
    assert schedule is not None
    raise InvalidInput(
        "micro-batches that change what a step computes are taken only when asked for",
        got=f"schedule {schedule.name!r}, which needs several, and {named_statistics(statistics)}, "
        "which would take statistics over each alone",
        remedy=f"microbatches={schedule.microbatches}, or another schedule",
        source=info(statistics[0]).source,
    )
