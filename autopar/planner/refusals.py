"""Refusals: why no way to run a step can be taken, in the words of a user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.candidates.candidate import Candidate
from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.candidates.room_checks import no_room_on_host
from autopar.candidates.staged import StagedWay
from autopar.capture.captured import Captured
from autopar.capture.sizes import rows_of
from autopar.errors import InvalidInput
from autopar.passes.batch_cutter import InseparableBatch
from autopar.planner.question import Question, Refused, TooLarge
from autopar.planner.rules import SearchEntry
from autopar.recompute import PLAIN
from autopar.search.smallest_footprint import NothingFits, SmallestFootprint
from autopar.states import HOSTED
from autopar.text.units import counted


def refusal(
    entries: Sequence[SearchEntry], request: Request, regions: Regions, captured: Captured
) -> InvalidInput:
    """Return why none of the questions has a way that fits."""
    too_large = [entry.answer for entry in entries if isinstance(entry.answer, TooLarge)]
    if not too_large:
        return _no_size(entries, request)
    ways = [way for answer in too_large if (way := _candidate(answer)) is not None]
    memory = request.memory
    if on_host := [w for w in ways if w.needed(memory) <= memory and w.fullest_host.room < 0]:
        return no_room_on_host(on_host)
    footprints = [answer.smallest for answer in too_large if answer.smallest is not None]
    if ways:  # where plans were priced, what layouts need at least says no more
        least_way = min(ways, key=lambda way: way.memory.peak)
        footprints = [least_way.footprint(least_way.alternative(memory))]
    return _nothing_fits(footprints, request, regions, captured)


def _candidate(answer: TooLarge) -> Candidate | None:
    return answer.way.candidate if isinstance(answer.way, StagedWay) else answer.way


def _nothing_fits(
    footprints: Sequence[SmallestFootprint], request: Request, regions: Regions, captured: Captured
) -> NothingFits:
    """Return the refusal that tells the least memory of all, and what may help."""
    least = min(footprints, key=lambda footprint: footprint.memory)
    is_plain = regions.kinds == (PLAIN,) and bool(regions.free)
    has_states = request.states is not None and request.states not in HOSTED
    untried = ('recompute="auto"',) * is_plain + ('states="auto"',) * has_states
    example = captured.example
    rows = rows_of(example.args, example.kwargs)
    return NothingFits.of(request.memory, replace(least, untried=untried, rows=rows or 0))


def _no_size(entries: Sequence[SearchEntry], request: Request) -> InvalidInput:
    """Return the one reason why there is no number of stages and micro-batches, as it was first
    met, or each reason with the first size that it holds for. What refuses the whole batch is no
    matter of micro-batches; else a batch that cannot be cut at all is the one reason."""
    errors = [(e.question, e.answer.error) for e in entries if isinstance(e.answer, Refused)]
    whole = [pair for pair in errors if pair[0].microbatches == 1]
    for _, error in errors if not whole else ():
        if isinstance(error, InseparableBatch):
            return error
    errors = whole or errors
    if len({error.rule for _, error in errors}) == 1:
        return errors[0][1]
    by_rule: dict[str, list[tuple[Question, InvalidInput]]] = defaultdict(list)
    for question, error in errors:
        by_rule[error.rule].append((question, error))
    often = sorted(by_rule.values(), key=lambda group: -len(group))  # what holds for most, first
    remedies = [str(often[0][0][1].remedy)] if often else []
    if request.given_options:
        remedies.append(f"leave {' or '.join(request.given_options)} out, which is then chosen")
    return InvalidInput(
        "a model can be run in some number of stages and micro-batches",
        got="\n".join(map(_reason, often)),
        remedy="; or ".join(remedies) or None,
    )


def _reason(errors: Sequence[tuple[Question, InvalidInput]]) -> str:
    (question, error), *others = errors
    more = f" (and {counted(len(others), 'other')})" if others else ""
    return f"{size_words(question)}{more}: {error.rule}: {error.got}"


def size_words(question: Question) -> str:
    """Return `2 stages, 4 micro-batches`."""
    parts = question.microbatches
    pipeline = "no pipeline" if question.stages == 1 else counted(question.stages, "stage")
    return pipeline + ("" if parts == 1 else f", {counted(parts, 'micro-batch')}")
