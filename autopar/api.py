"""parallelize(): the whole road of one call.

model ──capture──▶ graph ──search──▶ plan ──passes──▶ program ──runtime──▶ training steps
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InvalidInput
from autopar.planning import plan as make_plan
from autopar.runtime.agreement import agree, require_equal
from autopar.runtime.checks import Checks
from autopar.runtime.distributed import TorchBackend
from autopar.runtime.distributed_pipeline import TorchPipeline
from autopar.runtime.groups import enter_world
from autopar.runtime.module import Backend, ParallelModule
from autopar.runtime.plan import Plan
from autopar.runtime.saved import SavedPlan
from autopar.runtime.virtual import VirtualBackend
from autopar.runtime.virtual_pipeline import VirtualPipeline

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
    virtual mesh, at every value the ranks that should agree, and on processes their batches.
    """
    if backend not in (None, *BACKENDS):
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
    if backend is None:
        backend = "torch" if dist.is_initialized() or dist.is_torchelastic_launched() else "virtual"
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
    decided = _decide(model, args, kwargs, plan, options, backend)
    if local_inputs and decided.batches is not None:
        raise InvalidInput(
            "a step in micro-batches cuts the global batch, which every rank is given",
            got=f"local_inputs=True with {decided.microbatches} micro-batches",
            remedy="hand every rank the global batch, or microbatches=1",
        )
    whole = decided.batches.whole if decided.batches else decided.captured
    return ParallelModule(
        model,
        decided.program,
        decided,
        _backend(backend, decided, model, local_inputs, check),
        Checks(model, whole, backend == "torch") if check else None,
    )


def _decide(
    model: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    given: Plan | SavedPlan | None,
    options: Mapping[str, Any],
    backend: str,
) -> Plan:
    """The plan that this process carries out; on several ranks that of rank 0."""

    def attach(plan: Plan | SavedPlan) -> Plan:
        return plan.attach(model, args, kwargs)

    def make() -> Plan:
        return make_plan(model, args, kwargs, **options) if given is None else attach(given)

    def follow(first: SavedPlan) -> Plan:
        return attach(first) if given is None else require_equal(attach(given), first)

    if backend == "torch":
        enter_world()
        if dist.get_world_size() > 1:
            return agree(make, follow)
    return make()


def _backend(name: str, plan: Plan, model: nn.Module, local_inputs: bool, check: bool) -> Backend:
    if name == "virtual":
        virtual = VirtualPipeline if plan.pipelining else VirtualBackend
        return virtual(plan.program, _device_of(model), check)
    if plan.pipelining:
        return TorchPipeline(plan.program)
    return TorchBackend(plan.program, local_inputs)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
