"""The cost of a plan on the mesh that its search found to be the next best."""

from __future__ import annotations

from contextlib import suppress

from autopar.candidates.alternative import Alternative
from autopar.candidates.recomputation import AskedRecomputation
from autopar.candidates.request import Request
from autopar.errors import ExecutionError, InvalidInput
from autopar.mesh import Mesh
from autopar.planner.loop import Planner
from autopar.plans.plan_value import PlanValue
from autopar.recompute import Recompute
from autopar.search.smallest_footprint import NothingFits
from autopar.text.progress import reporter


def next_mesh(plan: PlanValue, limit: float) -> Alternative | None:
    """Return the cost of the next best mesh with the stages, micro-batches and states of a plan.

    Layouts are chosen anew. None if the search saw no other mesh, or that mesh cannot run it.
    """
    considered = () if plan.search is None else plan.search.considered
    others = [m for m in considered if m.mesh != plan.mesh and m.seconds is not None]
    if not others or plan.mesh not in (m.mesh for m in considered):
        return None
    inner = min(others, key=lambda other: other.seconds or 0.0).mesh
    request = _request_on(plan, inner)
    if request is None:
        return None
    with suppress(InvalidInput, NothingFits, ExecutionError), reporter(plan.progress) as report:
        report("mesh", str(request))
        planner = Planner(plan.original.example.model, plan.original, request, report)
        return planner.best()[0].alternative(limit)
    return None


def _request_on(plan: PlanValue, inner: Mesh) -> Request | None:
    """Return the request of a plan on another mesh, which reports memory and has no limit of it."""
    pipelining, mesh = plan.pipelining, inner
    if pipelining is not None:
        mesh = Mesh(**{pipelining.axis: pipelining.schedule.ranks, **inner.sizes})
        if plan.whole_mesh.names[0] != pipelining.axis:
            return None
    kinds = {*plan.decisions.recompute.values()}
    recompute = AskedRecomputation(kinds.pop() if len(kinds) == 1 else Recompute.of(None))
    if kinds:
        recompute = AskedRecomputation(Recompute.of(None), dict(plan.decisions.recompute))
    return Request(
        plan.cluster,
        "auto",
        plan.cluster.device.usable_memory,
        False,
        axis=None if pipelining is None else pipelining.axis,
        mesh=mesh,
        stages=1 if pipelining is None else pipelining.schedule.ranks,
        microbatches=plan.microbatches,
        schedule=None if pipelining is None else pipelining.schedule,
        recompute=recompute,
        states=plan.states,
    )
