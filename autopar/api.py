"""parallelize(): the whole road of one call.

model ──capture──▶ graph ──search──▶ plan ──passes──▶ program ──runtime──▶ training steps
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.failure import check_call
from autopar.cluster import Cluster
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.plan.plan import Plan, SavedPlan
from autopar.planner.request import Mode, PlanOptions, ScheduleLike
from autopar.planning import make_plan
from autopar.progress import Report
from autopar.runtime.backend import Backend
from autopar.runtime.checks import Checks
from autopar.runtime.distributed import TorchBackend
from autopar.runtime.failures import one_fails_all_stop
from autopar.runtime.groups import enter_world, require_world_of
from autopar.runtime.module import ParallelModule, refuse_meta
from autopar.runtime.plan_broadcast import agree, require_equal, require_same_call
from autopar.runtime.virtual import VirtualBackend
from autopar.runtime.world import has_failed

BackendName = Literal["virtual", "torch"]  # all ranks in this process, or this process is one
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)


@torch.inference_mode(False)  # what is made here learns
def parallelize(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | SavedPlan | None = None,
    backend: BackendName | None = None,
    local_inputs: bool = False,
    check: bool = False,
    cluster: Cluster | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    mode: Mode = "auto",
    memory: float | None = None,
    strict: bool = False,
    microbatches: int | Literal["auto"] = "auto",
    pipeline: str | int | None = "auto",
    schedule: ScheduleLike = "auto",
    schedule_options: Mapping[str, Any] | None = None,
    recompute: bool = False,
    progress: Report | bool | None = None,
) -> ParallelModule:
    """The same model as a parallel program.

    `args` and `kwargs` are an example of one global batch. `backend` is "virtual" (all ranks in
    this process) or "torch" (this process is one rank; the default under torchrun). `plan` is one
    that `plan()` made, or one from a file; on several ranks that of rank 0 holds. `local_inputs`:
    each rank will bring its own slice of the inputs. `check`: the first step compares the captured
    program with the plain model; every step, on the virtual mesh, at every value the ranks that
    should agree, and on processes their batches. Both are equal on all ranks, and a call that one
    rank refuses is refused on all. Everything else is as in `plan`.
    """
    options = PlanOptions(
        cluster,
        mesh,
        mode,
        memory,
        strict,
        microbatches,
        pipeline,
        schedule,
        schedule_options,
        recompute,
        progress,
    )
    call = _Call(model, args, kwargs or {}, plan, options)
    return _parallelize(call, backend, local_inputs, check)


@dataclass(frozen=True)
class _Call:
    """A model, an example of a global batch, and a plan for them or what is asked of one."""

    model: nn.Module
    args: tuple
    kwargs: Mapping[str, Any]
    plan: Plan | SavedPlan | None
    options: PlanOptions

    def check(self) -> None:
        """Refuse what this process sees by itself."""
        if self.plan is None or self.args or self.kwargs:  # a plan knows its own inputs
            check_call(self.model, self.args, self.kwargs)
        if self.plan is not None and self.options.given:
            raise InvalidInput(
                "a finished plan leaves nothing to decide",
                got=f"plan= together with {', '.join(self.options.given)}",
                remedy="give these to plan() instead",
            )

    def decide(self, plan: Plan | SavedPlan | None) -> Plan:
        """The plan that this process carries out, by itself."""
        refuse_meta(self.model)
        if plan is None:
            return make_plan(self.model, self.args, self.kwargs, self.options)
        return plan.attach(self.model, self.args, self.kwargs)

    def decide_together(self) -> Plan:
        """The plan of rank 0, on all ranks."""

        def follow(first: SavedPlan) -> Plan:
            if self.plan is None:
                return self.decide(first)
            return require_equal(self.decide(self.plan), first)

        if dist.get_world_size() == 1:
            return self.decide(self.plan)
        return agree(lambda: self.decide(self.plan), follow)


def _parallelize(
    call: _Call, backend: BackendName | None, local_inputs: bool, check: bool
) -> ParallelModule:
    model = call.model
    is_rank = dist.is_initialized() or dist.is_torchelastic_launched() or has_failed()
    place = backend if backend is not None else "torch" if is_rank else "virtual"

    def check_alone() -> None:
        _validate(place, local_inputs, check)
        call.check()

    if place == "virtual" or not is_rank:
        check_alone()
    if place == "virtual":
        decided = call.decide(call.plan)
        return _module(
            model, decided, VirtualBackend(decided.program, _device_of(model), check), check
        )
    device = enter_world(_device_of(model))
    with one_fails_all_stop(agreed=True):
        require_same_call(check_alone, local_inputs=bool(local_inputs), check=bool(check))
        decided = call.decide_together()
        require_world_of(decided.whole_mesh)
        _validate_slices(decided, local_inputs)
    with one_fails_all_stop():
        return _module(model, decided, TorchBackend(decided.program, local_inputs, device), check)


def _module(model: nn.Module, decided: Plan, backend: Backend, check: bool) -> ParallelModule:
    on_processes = not isinstance(backend, VirtualBackend)
    checks = Checks(model, decided.original, on_processes) if check else None
    return ParallelModule(model, decided.program, decided, backend, checks)


def _validate(backend: str, local_inputs: bool, check: bool) -> None:
    """Refuse what contradicts itself."""
    if backend not in BACKENDS:
        raise InvalidInput(
            "backend is one of " + ", ".join(map(repr, BACKENDS)),
            got=repr(backend),
            remedy='backend="virtual"',
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
