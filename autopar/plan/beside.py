"""Beside: the plan of another call of a model that is planned, on the same parameters.

    captured = captured_again(plan.original, args, kwargs, training)
    other = plan_beside(plan, captured, is_step=True)

The mesh, states, precision and recomputation stay, and where every parameter and buffer is.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.captured import Captured
from autopar.capture.fingerprint import fingerprint_of
from autopar.layout import Layout
from autopar.passes.microbatches import Microbatches, batch_of, cut_batch
from autopar.plan.plan import Plan, SavedPlan
from autopar.planner.beside import constraints_beside, search_beside, spread_beside
from autopar.planner.candidate import Candidate


def plan_beside(
    plan: Plan, captured: Captured, is_step: bool, inputs: Mapping[str, Layout] | None = None
) -> Plan:
    """The plan of what was captured. A step has the micro-batches of `plan`, or as many as divide
    its batch; a call runs in one go. `inputs`: where these lie, if that is not free."""
    parts = 1 if inputs is None else _parts(plan, inputs)
    batches = _batches(plan, captured, is_step, parts)
    program = captured if batches is None else batches.captured
    if plan.mode == "auto":
        made = search_beside(plan, program, batches, plan.limit, inputs)
    else:
        made = spread_beside(plan, plan.mode, program, batches)
    return _planned(plan, made)


def follow_beside(plan: Plan, captured: Captured, first: SavedPlan) -> Plan:
    """The plan that rank 0 has made of the same, here."""
    first.require_same(fingerprint_of(captured))
    count = first.microbatch_count
    batches = None if count is None else cut_batch(captured, count)
    program = captured if batches is None else batches.captured
    about = program, plan.cluster, first.decisions, batches
    return _planned(plan, Candidate(*about, search=first.search, states=plan.states))


def _planned(plan: Plan, made: Candidate) -> Plan:
    said = constraints_beside(plan, made.captured)
    return Plan.of(made, mode=plan.mode, limit=plan.limit, constraints=said)


def _parts(plan: Plan, inputs: Mapping[str, Layout]) -> int:
    """How many slices of the batch ranks bring."""
    cuts = (plan.mesh.degree(layout.dims[0]) for layout in inputs.values() if layout.ndim)
    return max(cuts, default=1)


def _batches(plan: Plan, captured: Captured, is_step: bool, parts: int) -> Microbatches | None:
    """Of so many parts of a batch each micro-batch takes its share."""
    if plan.batches is None or not is_step:
        return None
    batch, most = batch_of(captured) or 1, plan.batches.count
    counts = [count for count in range(2, most + 1) if batch % (parts * count) == 0]
    return cut_batch(captured, max(counts, default=1))
