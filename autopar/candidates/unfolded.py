"""Unfolded: a way to run a folded program, as one to run all of its blocks.

unfolded(candidate)                                 # of the whole program
with_program(candidate, program, batches, regions)  # of one with more of the same blocks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from autopar.candidates.candidate import Candidate
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.training_step import TrainingStep
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks, label_of
from autopar.layout import Layout, ParameterPlacement, Placement
from autopar.passes.microbatches import Microbatches, of_all_blocks
from autopar.pipeline.stages.stage_tables import price_stages
from autopar.recompute import Recompute
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import Strategy, tensor_inputs

T = TypeVar("T")


def unfolded(candidate: Candidate) -> Candidate:
    """Return the same way to run all blocks of the program."""
    if (whole := candidate.captured.unfolded) is None:
        return candidate
    batches = candidate.batches and of_all_blocks(candidate.batches, whole)
    program = whole if batches is None else batches.captured
    decided = candidate.decisions.recompute
    regions = unfolded_regions(decided, candidate.captured, blocks(whole))
    laid_out = replace(_laid_out(candidate, program, regions), folded=candidate.step.program)
    return Candidate(TrainingStep(laid_out, batches), candidate.search).changed(
        candidate.search, candidate.pipelining
    )


def _laid_out(
    candidate: Candidate, program: Captured, regions: Mapping[str, Recompute]
) -> LaidOutProgram:
    """Return a program with more of the same blocks, as they are laid out."""
    decisions = longer(candidate.decisions, candidate.captured, program, regions)
    return LaidOutProgram.of(
        program, candidate.cluster, decisions, states=candidate.states, line=candidate.line
    )


def with_program(
    candidate: Candidate,
    program: Captured,
    batches: Microbatches | None,
    regions: Mapping[str, Recompute],
) -> Candidate:
    """Return a way to run a `program` with more of the same blocks with the same layouts, states
    and stages, in as many micro-batches. `regions`: how those of it are recomputed."""
    laid_out = _laid_out(candidate, program, regions)
    longer_candidate = Candidate(TrainingStep(laid_out, batches), candidate.search)
    if (cut := candidate.pipelining) is None:
        return longer_candidate
    costs, places = longer_candidate.stage_costs(), candidate.stage_line.places
    starts = [costs.node(places[stage.starts]).name for stage in cut.stages]
    hardware = longer_candidate.stage_hardware(cut.schedule.placement, float("inf"))
    stages = tuple(price_stages(costs, starts, hardware))
    shared = costs.shared_sums(stages)
    pipelining = replace(cut, stages=stages, shared=shared)
    return longer_candidate.changed(candidate.search, pipelining, stage_costs=costs)


def longer(
    known: Decisions, short: Captured, program: Captured, regions: Mapping[str, Recompute]
) -> Decisions:
    """Return the decisions about a `program` with more of the same blocks, from those `known` about
    the short one. `regions`: how those of `program` are recomputed."""
    nodes = {node.name: node for node in short.graph.nodes}
    readers = {reader for _, reader, _ in known.ways}
    replicated = {fallback.node for fallback in known.fallbacks}
    placeholders, strategies = dict[str, Layout](), dict[str, Strategy]()
    apart = dict[str, ParameterPlacement]()
    ways, fallbacks = dict[tuple[str, str, int], tuple[Placement, ...]](), list[Fallback]()
    for node in program.graph.nodes:
        twin = short.twins.get(node.name, node.name)
        if twin in known.placeholders:
            placeholders[node.name] = known.placeholders[twin]
        if twin in known.apart:
            apart[node.name] = known.apart[twin]
        if twin in known.strategies:
            strategies[node.name] = known.strategies[twin]
        if twin in replicated:
            fallbacks.append(Fallback.of(node))
        if twin in readers:
            pairs = zip(tensor_inputs(node), tensor_inputs(nodes[twin]))
            for position, (value, other) in enumerate(pairs):
                if way := known.ways.get((other.name, twin, position)):
                    ways[value.name, node.name, position] = way
    return replace(
        known,
        placeholders=placeholders,
        strategies=strategies,
        fallbacks=tuple(fallbacks),
        ways=ways,
        apart=apart,
        recompute=dict(regions),
    )


def unfolded_regions(
    known: Mapping[str, T], short: Captured, regions: Collection[str]
) -> dict[str, T]:
    """Return what is known of `regions` of the whole program, from what is `known` of those of the
    short one."""
    if not known or short.unfolded is None:
        return {}
    nodes = {node.name: node for node in short.operators}
    twins: dict[str, str] = {}
    for node in short.unfolded.operators:
        twin = nodes.get(short.twins.get(node.name, node.name))
        region = label_of(node, regions)
        if region and twin is not None and region not in twins:
            twins[region] = label_of(twin, known) or ""
    return {name: known[twin] for name, twin in twins.items() if twin}
