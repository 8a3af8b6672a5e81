"""Admission: what a program must be to be planned as asked, and what its user should know."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.listing import operator_of
from autopar.errors import InvalidInput
from autopar.lines import frames_to_caller
from autopar.mesh import Mesh
from autopar.passes.microbatches import batch_statistics
from autopar.pipeline.schedule import Schedule
from autopar.planner.request import PlanOptions, Request, read_request
from autopar.search.decisions import Fallback
from autopar.strategies.node_info import info


def admit(captured: Captured, request: Request, options: PlanOptions) -> Request:
    """The request for this very program, if that can be planned as asked."""
    if options.strict:
        _require_rules(captured)
    if options.microbatches == "auto" and not isinstance(options.schedule, Schedule):
        request = _in_one_if_statistics(captured, request, options)
    if request.mesh is not None:
        refuse_random(captured, request.mesh, request.microbatches or 1, request.recompute)
    return request


def _in_one_if_statistics(captured: Captured, request: Request, options: PlanOptions) -> Request:
    """With one micro-batch, where more, which nobody asked for, change the loss."""
    statistics, made = batch_statistics(captured), request.schedule
    if not statistics:
        return request
    if made is None:
        return replace(request, microbatches=1)
    with suppress(InvalidInput):
        one = read_request(replace(options, microbatches=1))
        if one.microbatches == 1:
            return one
    raise InvalidInput(
        "micro-batches that change what a step computes are taken only when asked for",
        got=f"schedule {made.name!r}, which needs several, and {_named(statistics)}, "
        "which would take statistics over each alone",
        remedy=f"microbatches={made.microbatches}, or another schedule",
        source=info(statistics[0]).source,
    )


def _require_rules(captured: Captured) -> None:
    missing = [
        f"{operator_of(node)} at {info(node).source}"
        for node in captured.operators
        if captured.rules[node.name] is None
    ]
    if missing:
        raise InvalidInput(
            "with strict=True every operator has a rule",
            got="\n".join(dict.fromkeys(missing)),
            remedy="register_rule(operator, '... -> ...') for each, or strict=False to run them "
            "replicated",
        )


def refuse_random(captured: Captured, mesh: Mesh, slices: int, again: bool) -> None:
    """Refuse random numbers where several ranks, or several runs of a step, would draw them."""
    if mesh.size == slices == 1 and not again:
        return
    places = "" if mesh.size == 1 else f" on {mesh}"
    turns = "" if slices == 1 else f" in {slices} micro-batches"
    for node in captured.random:
        raise InvalidInput(
            "a random operator runs on one rank only: its bits would depend on the layout",
            got=f"{operator_of(node)} in {info(node).module or 'the model'}{places}{turns}",
            remedy="set its probability to 0 (or call model.eval() for it), or draw outside of "
            "forward and hand the numbers over as an input",
            source=info(node).source,
        )


def report_statistics(captured: Captured, slices: int) -> None:
    """Say what micro-batches change, where a user has asked for them."""
    statistics = batch_statistics(captured) if slices > 1 else ()
    if statistics:
        message = (
            f"{_named(statistics)} takes its statistics over each of {slices} micro-batches, not "
            "over the batch: loss, gradients and running statistics are not those of microbatches=1"
        )
        warnings.warn(message, stacklevel=frames_to_caller())


def _named(statistics: Sequence[fx.Node]) -> str:
    """Batch norms by their modules."""
    names = list(dict.fromkeys(info(node).module or "the model" for node in statistics))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"batch norm ({', '.join(names[:3])}{more})"


def report_fallbacks(fallbacks: tuple[Fallback, ...]) -> None:
    """Say which operators run replicated."""
    for operator, count in Counter(fallback.operator for fallback in fallbacks).items():
        first = next(fallback for fallback in fallbacks if fallback.operator == operator)
        message = (
            f"{operator} has no rule and runs replicated ({count} times, first at "
            f"{first.source}); register_rule() gives it one"
        )
        warnings.warn(message, stacklevel=frames_to_caller())
