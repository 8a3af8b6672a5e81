"""Next mesh: what a plan would take on the mesh that its search found to be the next best."""

from __future__ import annotations

from contextlib import suppress

from autopar.errors import ExecutionError, InvalidInput
from autopar.mesh import Mesh
from autopar.plan.plan_value import PlanValue
from autopar.planner.candidate import Alternative
from autopar.planner.deep import DeepPlanner
from autopar.planner.recomputation import AskedRecomputation
from autopar.planner.request import Request
from autopar.recompute import Recompute
from autopar.search.smallest_footprint import NothingFits
from autopar.text.progress import reporter


def next_mesh(plan: PlanValue, limit: float) -> Alternative | None:
    """The same stages, micro-batches, states and regions there, with layouts of its own."""
    considered = () if plan.search is None else plan.search.considered
    others = [one for one in considered if one.mesh != plan.mesh and one.seconds is not None]
    if not others or plan.mesh not in (one.mesh for one in considered):
        return None
    inner = min(others, key=lambda one: one.seconds or 0.0).mesh
    whole = _beside(plan, inner)
    if whole is None:
        return None
    with suppress(InvalidInput, NothingFits, ExecutionError), reporter(plan.progress) as report:
        report("mesh", str(whole))
        planner = DeepPlanner(plan.original.example.model, plan.original, whole, report)
        return planner.best().alternative(limit)
    return None


def _beside(plan: PlanValue, inner: Mesh) -> Request | None:
    """The plan as it is asked for by name on another mesh; memory is told, not kept to."""
    made, mesh = plan.pipelining, inner
    if made is not None:
        mesh = Mesh(**{made.axis: made.schedule.ranks, **inner.sizes})
        if plan.whole_mesh.names[0] != made.axis:
            return None
    kinds = {*plan.decisions.recompute.values()}
    again = AskedRecomputation(kinds.pop() if len(kinds) == 1 else Recompute.of(None))
    if kinds:
        again = AskedRecomputation(Recompute.of(None), dict(plan.decisions.recompute))
    return Request(
        plan.cluster,
        "auto",
        plan.cluster.device.memory,
        False,
        axis=None if made is None else made.axis,
        mesh=mesh,
        stages=1 if made is None else made.schedule.ranks,
        microbatches=plan.microbatches,
        schedule=None if made is None else made.schedule,
        recompute=again,
        states=plan.states,
    )
