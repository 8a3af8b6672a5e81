"""Verdict: what is refused or told of a program, the first of a module or a later one.

require_rules(captured)         before its search, with strict=True
refuse_random(captured, mesh, microbatches)
tell(captured, best)            of what was chosen
tell_of_uncut(best)             of what data parallelism leaves to all ranks
tell_of_whole_states(best)      of parameters that stay whole though states are cut
tell_of_statistics(captured, microbatches)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import fx

from autopar.candidates.candidate import Candidate
from autopar.candidates.patience import Ended
from autopar.capture.captured import Captured
from autopar.capture.listing import operator_of, registered_as, rule_for
from autopar.capture.normalisations.draws import instead
from autopar.capture.randomness import is_random
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import batch_statistics
from autopar.search.decisions import Fallback
from autopar.solver.cp_sat_residual import relative_gap
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results, maker
from autopar.text.source_lines import frames_to_caller
from autopar.text.units import counted, share_text

_LEAST_UNCUT = 0.05  # of the time that a step computes, that is worth a warning
_JOINED = (
    ": what is joined along the batch is cut where its parts have equal numbers of rows, or "
    "multiples of the smallest, that the ranks divide"
)


def tell(captured: Captured, best: Candidate, before: Candidate | None = None) -> None:
    """Refuse or tell what is wrong with a plan that was chosen. What was told of the plan
    `before` is not told again."""
    refuse_random(captured, best.whole_mesh, best.microbatches)
    if before is None or not batch_statistics(before.captured):
        tell_of_statistics(captured, best.microbatches)
    known = (
        {fallback.operator for fallback in before.decisions.fallbacks}
        if before is not None
        else set()
    )
    replicated: dict[str, list[Fallback]] = {}
    # One that draws random numbers is here on one rank alone, where there is nothing to cut.
    calls = {node.name: node for node in captured.operators if not is_random(node)}
    for fallback in best.decisions.fallbacks:
        if fallback.node in calls and fallback.operator not in known:
            replicated.setdefault(fallback.operator, []).append(fallback)
    for operator, places in replicated.items():
        warn(
            f"{operator} has no rule and runs replicated ({counted(len(places), 'time')}, first at "
            f"{places[0].source}): every rank does all of it. {rule_for(calls[places[0].node])}"
        )


def tell_of_uncut(best: Candidate) -> None:
    """Warn of operators that data parallelism leaves uncut, if they take a share of the step."""
    of_batch, uncut, total = set[fx.Node](), dict[fx.Node, float](), 0.0
    axes = {axis for axis in best.mesh if best.mesh[axis] > 1}
    for node in best.rewritten.nodes:
        reads_batch = not of_batch.isdisjoint(node.all_input_nodes)
        if info(node).calls:
            seconds = best.prices(node).seconds
            total += seconds
            ((_, strategy), *_) = info(node).calls
            if reads_batch and axes - {*strategy.axes}:
                uncut[node] = seconds
        # What a cut operator sums over samples, as statistics and losses, is no longer the batch.
        is_whole = maker(node) in uncut or info(node).movement is not None
        if node.name in best.captured.inputs or (
            reads_batch
            and node.op == "call_function"
            and (is_whole or has_results(node) or any(info(node).type.layout.dims))
        ):
            of_batch.add(node)
    share = sum(uncut.values()) / (total or 1.0)
    if share >= _LEAST_UNCUT:
        first = next(iter(uncut))
        is_joined = first.target is torch.ops.aten.cat.default
        warn(
            f'mode="data" leaves {counted(len(uncut), "operator")} uncut, with '
            f"{share_text(share)} of the time that a step computes: all ranks do the same there. "
            f"The first is {operator_of(first)} in {info(first).module or 'the model'}, at "
            f"{info(first).source}" + _JOINED * is_joined
        )


def tell_of_whole_states(best: Candidate) -> None:
    """Warn of parameters that every rank reads and keeps whole although states are cut."""
    whole = [
        node
        for node in best.rewritten.find_nodes(op="placeholder")
        if info(node).learns and info(node).places is not None and info(node).val.ndim
        if node.users and node.name not in best.decisions.apart
        if not any(info(node).type.layout.dims)
    ]
    if whole and best.states.is_cut and best.mesh.size > 1:
        first, names = next(iter(whole[0].users)), [best.captured.parameters[n.name] for n in whole]
        size = sum(info(node).val.nbytes for node in whole)
        warn(
            f"states={best.states} leaves {', '.join(names[:4])}{' and others' * (len(names) > 4)} "
            f"({size:,} bytes) whole on every rank: no sum of their gradients over the ranks that "
            f"cut the batch is left to the end of a step. The first is read at {info(first).source}"
        )


def tell_of_statistics(captured: Captured, microbatches: int) -> None:
    """Tell where micro-batches, which somebody has asked for, make another loss."""
    statistics = batch_statistics(captured)
    if statistics and microbatches > 1:
        warn(
            f"{named_statistics(statistics)} takes its statistics over each of {microbatches} "
            "micro-batches, not over the batch: loss, gradients and running statistics are not "
            "those of microbatches=1"
        )


def require_rules(captured: Captured) -> None:
    """Refuse operators that would run replicated for want of a rule."""
    missing = [
        f"{registered_as(node.target)} at {info(node).source}"
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


def refuse_random(captured: Captured, mesh: Mesh, microbatches: int) -> None:
    """Refuse random numbers where several ranks, or several runs of a step, would draw them."""
    if mesh.size == microbatches == 1:
        return
    places = "" if mesh.size == 1 else f" on {mesh}"
    turns = "" if microbatches == 1 else f" in {counted(microbatches, 'micro-batch')}"
    for node in captured.random:
        raise InvalidInput(
            "a random operator runs on one rank only: its bits would depend on the layout",
            got=f"{operator_of(node)} in {info(node).module or 'the model'}{places}{turns}",
            remedy=instead(node),
            source=info(node).source,
        )


def named_statistics(statistics: Sequence[fx.Node]) -> str:
    """Batch norms by their modules."""
    names = list(dict.fromkeys(info(node).module or "the model" for node in statistics))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"batch norm ({', '.join(names[:3])}{more})"


def cut_short(ended: Ended, seconds: float, best: Candidate) -> str:
    """Return what is to tell of planning that ended early."""
    is_time, bound = ended == "time", 0.0 if best.search is None else best.search.bound
    how = f"ended with its {seconds:g} seconds" if is_time else "was interrupted"
    most = f" by {share_text(relative_gap(best.seconds, bound))} at most" if bound else ""
    more = "; seconds=None weighs all" * is_time
    return (
        f"planning {how}: the plan is the best so far; "
        f"what was not weighed may be faster{most}{more}"
    )


def warn(message: str) -> None:
    """Tell of something at the user's line."""
    warnings.warn(message, stacklevel=frames_to_caller())
