"""parallelize(): the whole road of one call.

model ──capture──▶ graph ──search──▶ plan ──passes──▶ program ──runtime──▶ training steps
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture.failure import check_call
from autopar.errors import InvalidInput
from autopar.plan.file import SavedPlan
from autopar.plan.plan import Plan
from autopar.planning import plan as make_plan
from autopar.runtime.checks import Checks
from autopar.runtime.distributed import TorchBackend
from autopar.runtime.distributed_pipeline import TorchPipeline
from autopar.runtime.failures import one_fails_all_stop
from autopar.runtime.groups import enter_world, require_world_of
from autopar.runtime.module import Backend, ParallelModule, refuse_meta
from autopar.runtime.plan_broadcast import agree, require_equal, require_same_call
from autopar.runtime.virtual import VirtualBackend
from autopar.runtime.virtual_pipeline import VirtualPipeline
from autopar.runtime.world import has_failed

BACKENDS = ("virtual", "torch")


@torch.inference_mode(False)  # what is made here learns
def parallelize(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | SavedPlan | None = None,
    backend: str | None = None,
    local_inputs: bool = False,
    check: bool = False,
    **options: Any,
) -> ParallelModule:
    """The same model as a parallel program.

    `args` and `kwargs` are an example of one global batch. `backend` is "virtual" (all ranks in
    this process) or "torch" (this process is one rank; the default under torchrun). `plan` is one
    that `plan()` made, or one from a file; on several ranks that of rank 0 holds. Everything
    else is as in `plan`. `local_inputs`: each rank will bring its own slice of the inputs.
    `check`: the first step compares the captured program with the plain model; every step, on the
    virtual mesh, at every value the ranks that should agree, and on processes their batches. Both
    are equal on all ranks, and a call that one rank refuses is refused on all.
    """
    is_rank = dist.is_initialized() or dist.is_torchelastic_launched() or has_failed()
    place = backend if backend is not None else "torch" if is_rank else "virtual"

    def check_alone() -> None:
        """Refuse what this process sees by itself."""
        if plan is None or args or kwargs:  # a plan knows the inputs that it was made with
            check_call(model, args, kwargs or {})
        _validate(place, plan, options, local_inputs, check)

    if place == "virtual" or not is_rank:
        check_alone()
    if place == "virtual":
        decided = _decide(model, args, kwargs, plan, options)
        return _module(model, decided, virtual_backend(decided, _device_of(model), check), check)
    device = enter_world(_device_of(model))
    with one_fails_all_stop(agreed=True):
        require_same_call(check_alone, local_inputs=bool(local_inputs), check=bool(check))
        decided = _decide_together(model, args, kwargs, plan, options)
        require_world_of(decided.program.whole_mesh)
        _validate_slices(decided, local_inputs)
    with one_fails_all_stop():
        return _module(model, decided, _torch_backend(decided, local_inputs, device), check)


def virtual_backend(decided: Plan, device: torch.device, check: bool = False) -> Backend:
    """All ranks of a plan in this process."""
    virtual = VirtualPipeline if decided.pipelining else VirtualBackend
    return virtual(decided.program, device, check)


def _torch_backend(decided: Plan, local_inputs: bool, device: torch.device) -> Backend:
    """This process's rank of a plan."""
    if decided.pipelining:
        return TorchPipeline(decided.program, device)
    return TorchBackend(decided.program, local_inputs, device)


def _module(model: nn.Module, decided: Plan, backend: Backend, check: bool) -> ParallelModule:
    on_processes = not isinstance(backend, VirtualBackend)
    checks = Checks(model, decided.original, on_processes) if check else None
    return ParallelModule(model, decided.program, decided, backend, checks)


def _decide(
    model: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    given: Plan | SavedPlan | None,
    options: Mapping[str, Any],
) -> Plan:
    """The plan that this process carries out, by itself."""
    refuse_meta(model)
    if given is None:
        return make_plan(model, args, kwargs, **options)
    return given.attach(model, args, kwargs)


def _decide_together(
    model: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    given: Plan | SavedPlan | None,
    options: Mapping[str, Any],
) -> Plan:
    """The plan of rank 0, on all ranks."""

    def follow(first: SavedPlan) -> Plan:
        if given is None:
            return _decide(model, args, kwargs, first, {})
        return require_equal(_decide(model, args, kwargs, given, {}), first)

    if dist.get_world_size() == 1:
        return _decide(model, args, kwargs, given, options)
    return agree(lambda: _decide(model, args, kwargs, given, options), follow)


def _validate(
    backend: str,
    plan: Plan | SavedPlan | None,
    options: Mapping[str, Any],
    local_inputs: bool,
    check: bool,
) -> None:
    """Refuse what contradicts itself."""
    if backend not in BACKENDS:
        raise InvalidInput(
            "backend is one of " + ", ".join(map(repr, BACKENDS)),
            got=repr(backend),
            remedy='backend="virtual"',
        )
    if plan is not None and options:
        raise InvalidInput(
            "a finished plan leaves nothing to decide",
            got=f"plan= together with {', '.join(options)}",
            remedy="give these to plan() instead",
        )
    if backend == "virtual" and local_inputs:
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


def _validate_slices(decided: Plan, local_inputs: bool) -> None:
    if local_inputs and decided.batches is not None:
        raise InvalidInput(
            "a step in micro-batches cuts the global batch, which every rank is given",
            got=f"local_inputs=True with {decided.microbatches} micro-batches",
            remedy="hand every rank the global batch, or microbatches=1",
        )


def _device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are; what is no model is refused by all ranks together."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
