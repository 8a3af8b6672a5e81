"""Beside: the plan of another call of a model that is planned, on the same parameters.

    captured = captured_again(plan.original, args, kwargs, training)
    other = plan_beside(plan, captured, is_step=True)
    larger = resize(plan, other, captured, is_step=True)      # the same with inputs of other sizes

The mesh, states, precision and recomputation stay, and where every parameter and buffer is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from autopar.capture.captured import Captured
from autopar.capture.fingerprint import fingerprint_of
from autopar.layout import Layout
from autopar.passes.flow import flow_of
from autopar.passes.microbatches import Microbatches, batch_size, cut_batch
from autopar.passes.restaging import cut_like
from autopar.passes.stages import StageCut
from autopar.pipeline.pipelining import Pipelining
from autopar.plan.plan import Plan, SavedPlan
from autopar.plan.restaged import forward_batches, scheduled, without_gradients
from autopar.planner.beside import carry_beside, constraints_beside, search_beside, spread_beside
from autopar.planner.candidate import Candidate
from autopar.text.progress import reporter


@dataclass(frozen=True)
class StagedPlan(Plan):
    """That of a program which goes through the stages of the pipeline of another plan."""

    like: Plan | None = None

    def cut(self, pipelining: Pipelining) -> StageCut:
        """Stages that hold what they hold there."""
        return self._cut

    @cached_property
    def _cut(self) -> StageCut:
        assert self.like is not None
        assert self.like.pipelining is not None
        return cut_like(self.flow, self.like.cut(self.like.pipelining))


def plan_beside(
    plan: Plan, captured: Captured, is_step: bool, inputs: Mapping[str, Layout] | None = None
) -> Plan:
    """The plan of what was captured. A step has the micro-batches of `plan`, or as many as divide
    its batch; a call runs in one go, or forward through a pipeline. `inputs`: where these lie, if
    that is not free."""
    parts = 1 if inputs is None else _parts(plan, inputs)
    program, batches = _cut_up(plan, captured, is_step, _count(plan, captured, is_step, parts))
    if plan.mode == "auto" and (plan.pipelining is None or is_step):
        limit = plan.limit if plan.pipelining is None else None  # a stage holds its part
        with reporter(plan.progress) as report:
            made = search_beside(plan, program, batches, limit, inputs, report)
    else:
        made = spread_beside(plan, plan.mode, program, batches)
    return _planned(plan, made)


def resize(
    plan: Plan,
    like: Plan,
    captured: Captured,
    is_step: bool,
    inputs: Mapping[str, Layout] | None = None,
) -> Plan:
    """The plan of what was captured at other sizes than `like` was, which is `plan` or one beside
    it: its decisions hold, nothing is searched."""
    parts = 1 if inputs is None else _parts(plan, inputs)
    program, batches = _cut_up(plan, captured, is_step, _count(plan, captured, is_step, parts))
    return _planned(plan, carry_beside(plan, like, program, batches, inputs))


def follow_beside(plan: Plan, captured: Captured, is_step: bool, first: SavedPlan) -> Plan:
    """The plan that rank 0 has made of the same, here."""
    first.require_same(fingerprint_of(captured))
    program, batches = _cut_up(plan, captured, is_step, first.microbatch_count)
    about = program, plan.cluster, first.decisions, batches
    made = Candidate(*about, search=first.search, states=plan.states, line=plan.line)
    return _planned(plan, made)


def staged_beside(plan: Plan, made: Plan, is_step: bool) -> Plan:
    """The same in the stages of the pipeline of `plan`, if there is one."""
    given = plan.pipelining
    if given is None:
        return made
    staged = StagedPlan(**{f.name: getattr(made, f.name) for f in fields(Plan)}, like=plan)
    flow = flow_of(made.captured, made.rewritten, learns=is_step)
    vars(staged).update(prices=made.prices, rewritten=made.rewritten, flow=flow)
    line, bounds = staged.stage_costs(), itertools.pairwise(staged.cut(given).points)
    schedule = scheduled(given.schedule, made.microbatches, forward=not is_step)
    standing = staged.standings(schedule.placement, math.inf)
    stages = tuple(line.stage(*ends, at) for ends, at in zip(bounds, standing))
    shared = line.shared_sums(stages)
    here = replace(given, schedule=schedule, stages=stages, shared=shared)
    return staged.changed(made.search, here)


def _planned(plan: Plan, made: Candidate) -> Plan:
    said = constraints_beside(plan, made.captured)
    kept = {name: getattr(plan, name) for name in ("mode", "limit", "dynamic", "strict")}
    return Plan.of(made, constraints=said, **kept)


def _parts(plan: Plan, inputs: Mapping[str, Layout]) -> int:
    """How many slices of the batch ranks bring."""
    cuts = (plan.mesh.degree(layout.dims[0]) for layout in inputs.values() if layout.ndim)
    return max(cuts, default=1)


def _count(plan: Plan, captured: Captured, is_step: bool, parts: int) -> int | None:
    """Into how many micro-batches what was captured is cut, of a batch in so many slices."""
    if plan.batches is None or not (is_step or plan.pipelining is not None):
        return None
    batch, most = batch_size(captured) or 1, plan.batches.count
    counts = [count for count in range(2, most + 1) if batch % (parts * count) == 0]
    count = max(counts, default=1)
    return count if is_step or forward_batches(captured, count) is not None else None


def _cut_up(
    plan: Plan, captured: Captured, is_step: bool, count: int | None
) -> tuple[Captured, Microbatches | None]:
    """The program of one of so many micro-batches."""
    goes_forward = plan.pipelining is not None and not is_step
    batches = None if count is None else cut_batch(captured, count, tells=goes_forward)
    program = captured if batches is None else batches.captured
    return without_gradients(program) if goes_forward else program, batches
