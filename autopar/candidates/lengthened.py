"""Lengthened: a way to run a short program, as one to run the program that it stands for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from autopar.candidates.candidate import Candidate
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.training_step import TrainingStep
from autopar.capture.captured import Captured
from autopar.capture.folding import Folded
from autopar.capture.regions import label_of
from autopar.layout import Layout, ParameterPlacement, Placement
from autopar.passes.microbatches import Microbatches
from autopar.pipeline.stages.stage_tables import price_stages
from autopar.recompute import Recompute
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import Strategy, tensor_inputs

T = TypeVar("T")


def lengthened(
    candidate: Candidate,
    short: Folded,
    program: Captured,
    batches: Microbatches | None,
    decided: Mapping[str, Recompute],
    names: Mapping[str, str] | None = None,
) -> Candidate:
    """Return a way to run the whole `program` with the same layouts, states and stages, in as many
    micro-batches. `decided`: how its regions are recomputed; `names`: other names of axes."""
    decisions = longer(candidate.decisions, short, program, decided).renamed(names or {})
    laid_out = LaidOutProgram.of(
        program, candidate.cluster, decisions, states=candidate.states, line=candidate.line
    )
    longer_candidate = Candidate(TrainingStep(laid_out, batches), candidate.search)
    if (cut := candidate.pipelining) is None:
        return longer_candidate
    costs, places = longer_candidate.stage_costs(), candidate.stage_line.places
    starts = [costs.node(places[stage.starts]).name for stage in cut.stages]
    hardware = longer_candidate.stage_hardware(cut.schedule.placement, float("inf"))
    stages = tuple(price_stages(costs, starts, hardware))
    shared = costs.shared_sums(stages)
    pipelining = replace(cut, mesh=cut.mesh.renamed(names or {}), stages=stages, shared=shared)
    return longer_candidate.changed(candidate.search, pipelining, stage_costs=costs)


def longer(
    known: Decisions, short: Folded, program: Captured, decided: Mapping[str, Recompute]
) -> Decisions:
    """Return the decisions about a `program` with more of the same blocks, from those `known` about
    the short one. `decided`: how regions of `program` are recomputed."""
    nodes = {node.name: node for node in short.captured.graph.nodes}
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
        recompute=dict(decided),
    )


def recomputed(known: Mapping[str, T], short: Folded, regions: Collection[str]) -> dict[str, T]:
    """Return the decisions about `regions` of the whole program, from those of the short one."""
    if not known:
        return {}
    nodes = {node.name: node for node in short.captured.operators}
    twins: dict[str, str] = {}
    for node in short.whole.operators:
        twin = nodes[short.twins.get(node.name, node.name)]
        if (region := label_of(node, regions)) and region not in twins:
            twins[region] = label_of(twin, known) or ""
    return {name: known[twin] for name, twin in twins.items() if twin}
