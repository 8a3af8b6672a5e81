"""Beside: another program on the parameters of one that is there, which stay in their places.

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
from autopar.recompute import FULL, Recompute
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
from autopar.strategies.node_info import info
from autopar.text.progress import Report

_PLAN = "the plan"  # where a layout was said


def spread_beside(
    source: Candidate, mode: Mode, captured: Captured, batches: Microbatches | None = None
) -> Candidate:
    """Inputs of the same names lie as those of `source`, where they are large enough."""
    mesh, kept = source.mesh, _kept(source, captured)
    placed = source.decisions.placeholders
    given = {
        name: fitting(placed[name], info(node).val.shape, mesh)
        for name, node in _inputs(captured).items()
        if name in placed and placed[name].ndim == info(node).val.ndim
    }
    inputs = given | {key: kept[name] for key, name in captured.buffers.items()}
    said = replace(
        Constraints() if mode == "data" else constraints_beside(source, captured),
        parameters=_constraints({name: kept[name] for name in captured.parameters.values()}),
        inputs=_constraints(inputs),
    )
    left = [axis for axis in mesh if mesh[axis] > 1 and axis not in said.axes]
    decisions = propagate(
        captured, mesh, said, batch=(batch_size(captured) or 1) >= mesh.degree(left)
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
    """The fastest layouts; within `limit` bytes of each device, if some are. `inputs`: where these
    lie, if that is not free. `report` is told of the search."""
    said = constraints_beside(source, captured)
    parts = 1 if batches is None else batches.count

    def run(memory: float) -> Candidate:
        about = captured, source.machines, lambda mesh: said, memory, parts, source.states
        search = LayoutSearch(*about)
        search.report = report or search.report
        found = search.run([source.mesh])
        decisions = found.decisions
        placed = {**decisions.placeholders, **(inputs or {})}
        decisions = replace(decisions, placeholders=placed)
        return _placed(source, captured, batches, decisions).changed(found.report)

    best = run(math.inf)
    if limit is not None and best.memory.peak > limit:
        try:
            leaner = run(limit)
        except NothingFits:
            return best
        return min(best, leaner, key=lambda one: one.memory.peak)
    return best


def carry_beside(
    source: Candidate,
    like: Candidate,
    captured: Captured,
    batches: Microbatches | None = None,
    inputs: Mapping[str, Layout] | None = None,
) -> Candidate:
    """The layouts that `like` has, a program beside `source` or this itself, at inputs of other
    sizes. `inputs`: where these lie, if that is not free."""
    kept = _kept(source, captured)
    own = captured.parameters | captured.buffers
    placed = {**{key: kept[name] for key, name in own.items()}, **(inputs or {})}
    fixed = constraints_beside(source, captured).fixed
    decisions = carried(like.decisions, like.captured, captured, placed, fixed)
    return _placed(source, captured, batches, decisions)


def constraints_beside(source: Candidate, captured: Captured) -> Constraints:
    """What annotations ask for, as in `source` where dims are large enough for it, and where
    parameters are."""
    kept = _kept(source, captured)
    parameters = {name: kept[name] for name in captured.parameters.values()}
    marked = read_constraints(captured, source.mesh, {}, _marked_as(source, captured))
    recompute = _recomputed(source, captured)
    return replace(marked, parameters=_constraints(parameters), recompute=recompute)


def _marked_as(source: Candidate, captured: Captured) -> dict[str, Layout]:
    """The layouts that the markers of a program have in `source`. A cut gives way where a dim has
    fewer elements than pieces; a number of slices is that of the same axes, which cut unevenly."""
    there: dict[object, list[str]] = defaultdict(list)
    for node, annotation in markers_of(source.captured):
        there[info(node).module, replace(annotation, call=0)].append(node.name)
    names = {key: iter(found) for key, found in there.items()}
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
    """With every place of parameters and buffers that of `source`."""
    kept, own = _kept(source, captured), source.captured.parameters
    there = {own[key]: at for key, at in source.decisions.apart.items()}
    names = captured.parameters
    apart = {key: there[name] for key, name in names.items() if name in there}
    buffers = {key: kept[name] for key, name in captured.buffers.items()}
    placeholders = {**decisions.placeholders, **buffers}
    recompute = _recomputed(source, captured)
    decisions = replace(decisions, placeholders=placeholders, apart=apart, recompute=recompute)
    program = LaidOutProgram.of(
        captured, source.cluster, decisions, states=source.states, line=source.line
    )
    made = Candidate(TrainingStep(program, batches))
    if found := _unsummed(made):
        gathered = {key: _gathered(apart[key]) for key in found}
        decisions = replace(decisions, apart={**apart, **gathered})
        made = made.with_program(decisions=decisions)
    return made


def _unsummed(made: Candidate) -> list[str]:
    """The parameters that are optimized in pieces over axes over which no gradient is summed: the
    batch is too small for these axes, or others cut it."""
    results: Any = made.rewritten.output_node().args[0]
    learned = reached(results[: len(results) - len(made.captured.mutations)])
    copied = copied_parameters(made.rewritten.find_nodes(op="placeholder"), made.mesh)
    return [
        node.name
        for node, one in copied.items()
        if node in learned
        and not (
            {*one.places.optimizer.axes} <= {*one.leaf.axes, *one.pending}
            and one.leaf.cuts_into(one.places.optimizer)
        )
    ]


def _gathered(places: ParameterPlacement) -> ParameterPlacement:
    """Gathered in the program itself, which knows which of its gathers sum in backward."""
    return replace(places, storage=places.optimizer, gradient=places.optimizer)


def _kept(source: Candidate, captured: Captured) -> Mapping[str, Layout]:
    """Where readers find the parameters and buffers of `captured`; whole what `source` lacks."""
    names = source.captured.parameters | source.captured.buffers
    there = {name: source.decisions.placeholders[key] for key, name in names.items()}
    own = captured.parameters | captured.buffers
    nodes = [node for node in captured.graph.find_nodes(op="placeholder") if node.name in own]
    whole = {own[node.name]: Layout.replicated(info(node).val.ndim) for node in nodes}
    return {**whole, **there}


def _recomputed(source: Candidate, captured: Captured) -> dict[str, Recompute]:
    """What runs again in backward: the regions of `source` that are there, and checkpoints."""
    decided = source.decisions.recompute
    own = dict.fromkeys(checkpoints(captured), FULL)
    there = found(captured, (*own, *decided))
    return {name: decided.get(name) or own[name] for name in there}


def _constraints(layouts: Mapping[str, Layout]) -> dict[str, LayoutConstraint]:
    return {name: LayoutConstraint(layout, _PLAN) for name, layout in layouts.items()}


def _inputs(captured: Captured) -> dict[str, fx.Node]:
    nodes = {node.name: node for node in captured.graph.find_nodes(op="placeholder")}
    return {name: nodes[name] for name in captured.inputs if name is not None}
