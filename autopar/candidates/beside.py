"""Beside: another program on the parameters of a planned one, which stay in their places.

    spread_beside(source, mode, captured)      layouts spread from where parameters and inputs lie
    search_beside(source, captured)            the fastest layouts on the same mesh
    carry_beside(source, like, captured)       those of another program, at other sizes of inputs

The program of a whole batch beside steps in micro-batches, of another batch, mode or signature:
parameters, and buffers, lie as `source` has them; what else is decided is free.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.candidates.candidate import Candidate
from autopar.candidates.carried import carried, fitting
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.training_step import TrainingStep
from autopar.capture.captured import Captured
from autopar.capture.gradients import reached
from autopar.capture.regions import checkpoints, found
from autopar.cost.copy_groups import copied_parameters
from autopar.defaults import Mode
from autopar.layout import Layout, ParameterPlacement
from autopar.passes.microbatches import Microbatches, batch_size
from autopar.recompute import Recompute
from autopar.search.constraints import (
    Constraints,
    LayoutConstraint,
    markers_of,
    read_constraints,
)
from autopar.search.decisions import Decisions
from autopar.search.layout_search import LayoutSearch
from autopar.search.propagation import propagate
from autopar.search.smallest_footprint import NothingFits
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info
from autopar.text.progress import Report

_PLAN = "the plan"  # where a layout was said


def spread_beside(
    source: Candidate, mode: Mode, captured: Captured, batches: Microbatches | None = None
) -> Candidate:
    """Return layouts spread from parameters, and from inputs that `source` has, where these are
    large enough."""
    mesh, layouts = source.mesh, _source_layouts(source, captured)
    placed = source.decisions.placeholders
    carried_inputs = {
        name: fitting(placed[name], info(node).val.shape, mesh)
        for name, node in _inputs(captured).items()
        if name in placed and placed[name].ndim == info(node).val.ndim
    }
    inputs = carried_inputs | {key: layouts[name] for key, name in captured.buffers.items()}
    constraints = replace(
        Constraints() if mode == "data" else constraints_beside(source, captured),
        parameters=_constraints({name: layouts[name] for name in captured.parameters.values()}),
        inputs=_constraints(inputs),
    )
    free_axes = [axis for axis in mesh if mesh[axis] > 1 and axis not in constraints.axes]
    decisions = propagate(
        captured, mesh, constraints, batch=(batch_size(captured) or 1) >= mesh.degree(free_axes)
    )
    return _placed(source, captured, batches, decisions)


def search_beside(
    source: Candidate,
    captured: Captured,
    batches: Microbatches | None = None,
    limit: float | None = None,
    inputs: Mapping[str, Layout] | None = None,
    report: Report | None = None,
) -> Candidate:
    """Return the fastest layouts; within `limit` bytes of each device, if some are. `inputs`: where
    these lie, if that is not free. `report` is called during the search."""
    constraints = constraints_beside(source, captured)
    count = 1 if batches is None else batches.count

    def run(memory: float) -> Candidate:
        search = LayoutSearch(
            captured, source.machines, lambda mesh: constraints, memory, count, source.states
        )
        search.report = report or search.report
        result = search.run([source.mesh])
        decisions = result.decisions
        placed = {**decisions.placeholders, **(inputs or {})}
        decisions = replace(decisions, placeholders=placed)
        return _placed(source, captured, batches, decisions).changed(result.report)

    best = run(math.inf)
    if limit is not None and best.memory.peak > limit:
        try:
            leaner = run(limit)
        except NothingFits:
            return best
        return min(best, leaner, key=lambda candidate: candidate.memory.peak)
    return best


def carry_beside(
    source: Candidate,
    like: Candidate,
    captured: Captured,
    batches: Microbatches | None = None,
    inputs: Mapping[str, Layout] | None = None,
) -> Candidate:
    """Return the layouts of `like`, a program beside `source` or `source` itself, at inputs of
    other sizes. `inputs`: where these lie, if that is not free."""
    layouts = _source_layouts(source, captured)
    names = captured.parameters | captured.buffers
    placed = {**{key: layouts[name] for key, name in names.items()}, **(inputs or {})}
    fixed = constraints_beside(source, captured).fixed
    decisions = carried(like.decisions, like.captured, captured, placed, fixed)
    return _placed(source, captured, batches, decisions)


def carry_slice(source: Candidate, captured: Captured) -> Candidate:
    """Return the layouts of `source` for the program of one slice of its tokens.

    The keys and values of a sequence lie as attention reads those of the slice."""
    layouts = _source_layouts(source, captured)
    names = captured.parameters | captured.buffers
    placed = {key: layouts[name] for key, name in names.items()}
    fixed = dict(source.decisions.fixed)
    decisions = carried(source.decisions, source.captured, captured, placed, fixed, by_name=True)
    buffers = dict[str, Layout]()
    for node in captured.operators:
        rule = captured.rules[node.name]
        for at, value in enumerate(tensor_inputs(node) if rule is not None else ()):
            if value.name in captured.sequence_buffers:
                assert rule is not None
                buffers[value.name] = rule.signature(decisions.strategies[node.name]).inputs[at]
    placeholders = {**decisions.placeholders, **buffers}
    return _placed(source, captured, None, replace(decisions, placeholders=placeholders))


def constraints_beside(source: Candidate, captured: Captured) -> Constraints:
    """Return what annotations ask for, as in `source` where dims are large enough, with parameters
    in their places."""
    layouts = _source_layouts(source, captured)
    parameters = {name: layouts[name] for name in captured.parameters.values()}
    marked = read_constraints(captured, source.mesh, {}, _marked_as(source, captured))
    recompute = _recomputed(source, captured)
    return replace(marked, parameters=_constraints(parameters), recompute=recompute)


def _marked_as(source: Candidate, captured: Captured) -> dict[str, Layout]:
    """Return the layouts that the markers of a program have in `source`. A cut gives way where a
    dim has fewer elements than pieces; a number of slices is that of the same axes, which cut
    unevenly."""
    markers: dict[object, list[str]] = defaultdict(list)
    for node, annotation in markers_of(source.captured):
        markers[info(node).module, replace(annotation, call=0)].append(node.name)
    names = {key: iter(group) for key, group in markers.items()}
    known: dict[str, Layout] = {}
    for node, annotation in markers_of(captured):
        name = next(names.get((info(node).module, replace(annotation, call=0)), iter(())), "")
        if name in source.decisions.fixed:
            layout = source.decisions.fixed[name]
            known[node.name] = fitting(layout, tuple(info(node).val.shape), source.mesh)
    return known


def _placed(
    source: Candidate, captured: Captured, batches: Microbatches | None, decisions: Decisions
) -> Candidate:
    """Return the candidate with parameters and buffers in their places of `source`."""
    layouts, source_names = _source_layouts(source, captured), source.captured.parameters
    source_places = {source_names[key]: at for key, at in source.decisions.apart.items()}
    names = captured.parameters
    apart = {key: source_places[name] for key, name in names.items() if name in source_places}
    buffers = {key: layouts[name] for key, name in captured.buffers.items()}
    placeholders = {**decisions.placeholders, **buffers}
    recompute = _recomputed(source, captured)
    decisions = replace(decisions, placeholders=placeholders, apart=apart, recompute=recompute)
    program = LaidOutProgram.of(
        captured, source.cluster, decisions, states=source.states, line=source.line
    )
    candidate = Candidate(TrainingStep(program, batches))
    if unsummed := _unsummed(candidate):
        gathered = {key: _gathered(apart[key]) for key in unsummed}
        decisions = replace(decisions, apart={**apart, **gathered})
        candidate = candidate.with_program(decisions=decisions)
    return candidate


def _unsummed(candidate: Candidate) -> list[str]:
    """Return the parameters that are optimized in pieces over axes over which no gradient is
    summed: the batch is too small for these axes, or others cut it."""
    results: Any = candidate.rewritten.output_node().args[0]
    learned = reached(results[: len(results) - len(candidate.captured.mutations)])
    copied = copied_parameters(candidate.rewritten.find_nodes(op="placeholder"), candidate.mesh)
    return [
        node.name
        for node, copy in copied.items()
        if node in learned
        and not (
            {*copy.places.optimizer.axes} <= {*copy.leaf.axes, *copy.pending}
            and copy.leaf.cuts_into(copy.places.optimizer)
        )
    ]


def _gathered(places: ParameterPlacement) -> ParameterPlacement:
    """Return places where a parameter is gathered in the program itself, which knows which of its
    gathers sum in backward."""
    return replace(places, storage=places.optimizer, gradient=places.optimizer)


def _source_layouts(source: Candidate, captured: Captured) -> Mapping[str, Layout]:
    """Return the layouts in which readers find parameters and buffers of `captured`: those of
    `source`, and whole ones of what it lacks."""
    names = source.captured.parameters | source.captured.buffers
    placed = {name: source.decisions.placeholders[key] for key, name in names.items()}
    wanted = captured.parameters | captured.buffers
    nodes = [node for node in captured.graph.find_nodes(op="placeholder") if node.name in wanted]
    whole = {wanted[node.name]: Layout.replicated(info(node).val.ndim) for node in nodes}
    return {**whole, **placed}


def _recomputed(source: Candidate, captured: Captured) -> dict[str, Recompute]:
    """Return the regions that run again in backward: checkpoints, and those that `source` has."""
    decided = source.decisions.recompute
    wrapped = checkpoints(captured)
    regions = found(captured, (*wrapped, *decided))
    return {name: decided.get(name) or wrapped[name] for name in regions}


def _constraints(layouts: Mapping[str, Layout]) -> dict[str, LayoutConstraint]:
    return {name: LayoutConstraint(layout, _PLAN) for name, layout in layouts.items()}


def _inputs(captured: Captured) -> dict[str, fx.Node]:
    nodes = {node.name: node for node in captured.graph.find_nodes(op="placeholder")}
    return {name: nodes[name] for name in captured.inputs if name is not None}
