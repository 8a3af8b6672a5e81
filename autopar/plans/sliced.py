"""Stages of token slices: those of a plan's pipeline, once for each slice of a sequence."""

from __future__ import annotations

from autopar.candidates.beside import carry_slice
from autopar.candidates.candidate import Candidate
from autopar.errors import InvalidInput
from autopar.passes.flow import flow_of
from autopar.passes.restaging import cut_like
from autopar.passes.stages import Stage, split_stages
from autopar.passes.token_cutter import REMEDY, cut_tokens, slice_lengths


def sliced_stages(plan: Candidate) -> tuple[tuple[Stage, ...], ...]:
    """Return, by slice, the stages that run it; none if the plan's schedule has no slices."""
    pipelining = plan.pipelining
    if pipelining is None or not pipelining.schedule.slices:
        return ()
    lengths = slice_lengths(plan.captured, pipelining.schedule.slices)
    cut, slices = plan.cut(pipelining), list[tuple[Stage, ...]]()
    for number in range(len(lengths)):
        captured = cut_tokens(plan.captured, lengths, number)
        laid_out = carry_slice(plan, captured)
        flow = flow_of(captured, laid_out.rewritten)
        slices.append(split_stages(cut_like(flow, cut), plan.mesh))
        _require_like(slices[0], slices[-1])
    return tuple(slices)


def _require_like(first: tuple[Stage, ...], other: tuple[Stage, ...]) -> None:
    """Refuse slices whose stages hand on other values, or statistics."""
    for stage, twin in zip(first, other):
        shapes = {(s.receives, s.sends, s.learns_received, s.learns_sent) for s in (stage, twin)}
        if stage.statistics or len(shapes) > 1:
            raise InvalidInput(
                "the slices of terapipe go through the same stages, which keep no statistics",
                got=f"stage {stage.index} of {', '.join(stage.receives) or 'the inputs'}",
                remedy=REMEDY,
            )
