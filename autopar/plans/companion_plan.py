"""Companion plans: the plan of another call of a model that is planned, on the same parameters.

    captured = captured_again(plan.original, args, kwargs, training)
    other = plan_companion(plan, captured, is_step=True)
    larger = resize_companion(plan, other, captured, is_step=True)   # inputs of other sizes

The mesh, states, precision and recomputation stay, and where every parameter and buffer is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.candidates.beside import carry_beside, constraints_beside, search_beside, spread_beside
from autopar.candidates.candidate import Candidate
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.training_step import TrainingStep
from autopar.capture.captured import Captured
from autopar.capture.fingerprint import fingerprint_of
from autopar.layout import Layout
from autopar.passes.microbatches import Microbatches, batch_size, cut_batch
from autopar.passes.restaging import cut_like
from autopar.plans.plan import Plan, SavedPlan
from autopar.plans.restaged import forward_batches, resize_schedule, without_gradients
from autopar.text.progress import reporter


def plan_companion(
    plan: Plan, captured: Captured, *, is_step: bool, inputs: Mapping[str, Layout] | None = None
) -> Plan:
    """Return a plan of a captured call on the parameters of `plan`.

    A step has the micro-batches of `plan`, or as many as divide its batch. A call runs in one go,
    or forward through a pipeline. `inputs` fixes the layouts of inputs; None leaves them free.
    """
    count = _microbatch_count(plan, captured, inputs, is_step=is_step)
    program, batches = _cut_batch(plan, captured, count, is_step=is_step)
    if plan.mode == "auto" and (plan.pipelining is None or is_step):
        limit = plan.limit if plan.pipelining is None else None  # a stage holds its part
        with reporter(plan.progress) as report:
            candidate = search_beside(plan, program, batches, limit, inputs, report)
    else:
        candidate = spread_beside(plan, plan.mode, program, batches)
    return _plan_of(plan, candidate)


def resize_companion(
    plan: Plan,
    like: Plan,
    captured: Captured,
    *,
    is_step: bool,
    inputs: Mapping[str, Layout] | None = None,
) -> Plan:
    """Return the plan of a call that differs from that of `like` in the sizes of inputs alone.

    `like` is `plan` or a companion of it. Its decisions hold: nothing is searched.
    """
    count = _microbatch_count(plan, captured, inputs, is_step=is_step)
    program, batches = _cut_batch(plan, captured, count, is_step=is_step)
    return _plan_of(plan, carry_beside(plan, like, program, batches, inputs))


def follow_companion(plan: Plan, captured: Captured, first: SavedPlan, *, is_step: bool) -> Plan:
    """Return the companion that rank 0 has planned, for this rank's copy of the model."""
    first.require_same(fingerprint_of(captured))
    program, batches = _cut_batch(plan, captured, first.microbatch_count, is_step=is_step)
    laid_out = LaidOutProgram.of(
        program, plan.cluster, first.decisions, states=plan.states, line=plan.line
    )
    return _plan_of(plan, Candidate(TrainingStep(laid_out, batches), first.search))


def stage_companion(plan: Plan, companion: Plan, *, is_step: bool) -> Plan:
    """Return a companion in the stages of the pipeline of `plan`; itself if there is none."""
    pipelining = plan.pipelining
    if pipelining is None:
        return companion
    program = companion.step.program
    if not is_step:
        program = replace(program, learns=False, source=program)
    costs, cut = program.stage_line, cut_like(program.flow, plan.cut(pipelining))
    schedule = resize_schedule(pipelining.schedule, companion.microbatches, forward=not is_step)
    hardware = companion.stage_hardware(schedule.placement, math.inf)
    bounds = itertools.pairwise(cut.points)
    stages = tuple(costs.stage(*ends, at) for ends, at in zip(bounds, hardware))
    shared = costs.shared_sums(stages)
    pipelining = replace(pipelining, schedule=schedule, stages=stages, shared=shared)
    step = TrainingStep(program, companion.batches, pipelining, known_cut=cut)
    return replace(companion, step=step)


def _plan_of(plan: Plan, candidate: Candidate) -> Plan:
    constraints = constraints_beside(plan, candidate.captured)
    options = {name: getattr(plan, name) for name in ("mode", "limit", "dynamic", "strict")}
    return Plan.of(candidate, constraints=constraints, **options)


def _microbatch_count(
    plan: Plan, captured: Captured, inputs: Mapping[str, Layout] | None, *, is_step: bool
) -> int | None:
    """Return into how many micro-batches a call is cut; None for one that runs whole.

    Each rank brings a slice of the batch where `inputs` are cut, and each slice is cut evenly.
    """
    if plan.batches is None or not (is_step or plan.pipelining is not None):
        return None
    layouts = () if inputs is None else inputs.values()
    slices = max((plan.mesh.degree(at.dims[0]) for at in layouts if at.ndim), default=1)
    batch, most = batch_size(captured) or 1, plan.batches.count
    counts = [count for count in range(2, most + 1) if batch % (slices * count) == 0]
    count = max(counts, default=1)
    return count if is_step or forward_batches(captured, count) is not None else None


def _cut_batch(
    plan: Plan, captured: Captured, count: int | None, *, is_step: bool
) -> tuple[Captured, Microbatches | None]:
    """Return the program of one micro-batch of `count`; the whole one where that is None."""
    goes_forward = plan.pipelining is not None and not is_step
    batches = None if count is None else cut_batch(captured, count, with_outputs=goes_forward)
    program = captured if batches is None else batches.captured
    return without_gradients(program) if goes_forward else program, batches
