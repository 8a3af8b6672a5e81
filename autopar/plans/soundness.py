"""Checks that a plan from a file agrees with itself, and with the program it is attached to.

The schema has checked the types of everything. Checked here: names exist, layouts fit, numbers that
stand in two places are the same, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.marker import ANNOTATE
from autopar.capture.regions import checkpoints
from autopar.capture.regions import found as regions_in
from autopar.errors import InvalidInput
from autopar.layout import ParameterPlacement
from autopar.pipeline.pipelining import Pipelining
from autopar.plans.saved_value import SavedValue
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType
from autopar.text.units import counted

_REMEDY = "make the plan again, and save it"


def require_sound(saved: SavedValue) -> None:
    """Refuse a plan that contradicts itself."""
    placed = saved.decisions.placeholders
    _require_names("parameters with places apart", saved.decisions.apart, placed, ())
    stored = (*saved.fingerprint.parameters, *saved.fingerprint.buffers)
    _require_names("parameters and buffers", saved.annotated, stored, ())
    if saved.dynamic is not None:
        roots = (dim.root for dim in saved.dynamic.dims)
        _require_names("dims that vary", roots, saved.dynamic.ranges, ())
    for name in stored:
        if name not in saved.types:
            _fail("a plan has a layout for each parameter and buffer", f"none for {name}")
    for name, type_ in saved.types.items():
        type_.layout.validate(type_.shape, saved.mesh)
        if name in saved.decisions.placeholders and type_.layout.partial:
            _fail("what goes into a program is no partial sum", f"{name}: {type_}")
    for name, places in saved.decisions.apart.items():
        _require_places(saved, name, places)
    for (value, reader, _), way in saved.decisions.ways.items():
        for at in way:
            if any(axis not in saved.mesh for axis in (*at.layout.axes, *at.pending)):
                got = f"{value} on its way to {reader}: {at}"
                _fail("a value on its way uses the axes of the mesh", got)
    ranks = saved.mesh.size
    if saved.pipelining is not None:
        ranks = saved.pipelining.mesh.size
        _require_pipeline(saved)
    if ranks > saved.cluster.devices:
        _fail(
            "a mesh has at most as many ranks as the cluster has devices",
            f"{counted(ranks, 'rank')} on {counted(saved.cluster.devices, 'device')}",
        )


def require_step(pipelining: Pipelining | None) -> None:
    """Refuse to make a module of the plan of a call through the stages of another plan."""
    if pipelining is not None and not pipelining.schedule.goes_back:
        raise InvalidInput(
            "a plan that is attached to a model is one that it can train by",
            got="that of a call, which goes forward alone through the stages of another plan",
            remedy="attach the other one: its module plans calls when they are made",
        )


def _require_places(saved: SavedValue, name: str, places: ParameterPlacement) -> None:
    """Refuse places of a parameter that do not fit its tensor or each other."""
    type_ = saved.types[name]
    for layout in (places.storage, places.working, places.gradient, places.optimizer):
        layout.validate(type_.shape, saved.mesh)
    is_read = places.working == saved.decisions.placeholders[name]
    if not is_read or not places.is_nested or places.optimizer.partial:
        rule = (
            "a parameter is read where the plan says; where it is stored, summed and optimized, "
            "one dim is cut further, so that pieces nest; if it is stored on the host, it is "
            "optimized there"
        )
        _fail(rule, f"{name}: {places}")


def _require_pipeline(saved: SavedValue) -> None:
    pipelining, count = saved.pipelining, saved.microbatch_count
    assert pipelining is not None
    schedule, axis, mesh = pipelining.schedule, pipelining.axis, pipelining.mesh
    if axis not in mesh or mesh.without(axis) != saved.mesh or mesh[axis] != schedule.ranks:
        _fail(
            "the mesh of a pipeline is that of a stage and the ranks of its schedule",
            f"{mesh} over {axis!r}, {saved.mesh} in a stage, {counted(schedule.ranks, 'rank')}",
        )
    if len(pipelining.stages) != schedule.stages or count != schedule.batch_parts:
        _fail(
            "a plan has the stages and the micro-batches of its schedule",
            f"stages: {len(pipelining.stages)} for {schedule.stages}; micro-batches: {count} for "
            f"{schedule.batch_parts}",
        )
    for shared in pipelining.shared:
        stages, known = shared.stages, range(schedule.stages)
        is_several = len(stages) > 1 and [*stages] == sorted({*stages}) and {*stages} <= {*known}
        if not is_several or not 0 < shared.bytes <= min(pipelining.stages[s].sums for s in stages):
            _fail(
                "what several stages share is a part of what each sums, in the order of stages",
                f"{shared.bytes} bytes of the stages {', '.join(map(str, stages))}",
            )


def require_fitting(saved: SavedValue, captured: Captured) -> None:
    """Refuse a plan whose names, layouts or strategies are not those of `captured`."""
    nodes = {node.name: node for node in captured.graph.nodes}
    calls = {name for name, node in nodes.items() if node.op == "call_function"}
    markers = {name for name in calls if nodes[name].target is ANNOTATE}
    decisions = saved.decisions
    placeholders = {name for name, node in nodes.items() if node.op == "placeholder"}
    _require_names("values that go in", decisions.placeholders, placeholders, placeholders)
    _require_names("parameters", decisions.apart, captured.parameters, ())
    _require_names("annotations", decisions.fixed, markers, markers)
    known = regions_in(captured, decisions.recompute)
    _require_names("regions that are recomputed", decisions.recompute, known, checkpoints(captured))
    _require_names("operators", decisions.strategies, calls, ())
    _require_names("annotated parameters", saved.annotated, set(captured.parameters.values()), ())
    for name in (*decisions.placeholders, *decisions.fixed):
        type_, value = saved.types[name], info(nodes[name]).val
        if (type_.shape, type_.dtype) != (tuple(value.shape), value.dtype):
            _fail("a type has the shape and dtype of its value", f"{name}: {type_}")
    for name in decisions.strategies:
        _require_rule(saved, captured, nodes[name])
    for (read, reader, position), way in decisions.ways.items():
        inputs = tensor_inputs(nodes[reader]) if reader in calls else ()
        if position >= len(inputs) or read not in {node.name for node in inputs}:
            _fail("a way leads from a value to its reader", f"{read} to {reader}, {position}")
        if any(at.layout.ndim != info(nodes[read]).val.ndim for at in way):
            _fail("a layout names every dim of its tensor, once", f"{read} to {reader}: {way}")


def _require_names(
    what: str, names: Iterable[str], known: Iterable[str], needed: Iterable[str]
) -> None:
    unknown, missing = set(names) - set(known), set(needed) - set(names)
    for name in sorted(unknown | missing):
        is_missing = "is missing" if name in missing else "is not there"
        _fail(f"a plan names the {what} of its program", f"{name}, which {is_missing}")


def _require_rule(saved: SavedValue, captured: Captured, node: fx.Node) -> None:
    strategy, rule = saved.decisions.strategies[node.name], captured.rules[node.name]
    known = (*rule.factors, *rule.joints, *rule.parts) if rule else ()
    unknown = {factor for factor, _ in strategy.cuts} - set(known)
    if rule is None or unknown:
        raise InvalidInput(
            "the strategies of a plan are such as the rules of its operators allow",
            got=f"{strategy} for {node.name}, whose rule is {rule and rule.text!r}",
            remedy="register the rules that the plan was made with, or make it again",
            source=info(node).source,
        )
    rule.validate(strategy, saved.mesh, info(node).source)


def require_apart(saved: SavedValue, apart: Mapping[str, ParameterPlacement]) -> None:
    """Refuse a plan that has parameters elsewhere than its states say."""
    of_file = saved.decisions.apart
    for name in dict.fromkeys([*of_file, *apart]):
        if of_file.get(name) != apart.get(name):
            got = (
                f"{name}: {of_file.get(name)}, where {apart.get(name)} follows from {saved.states}"
            )
            _fail("the places of parameters follow from the states of a plan", got)


def require_types(saved: SavedValue, types: Mapping[str, TensorType]) -> None:
    """Refuse a plan that says other layouts than follow from its decisions."""
    for name in dict.fromkeys([*saved.types, *types]):
        if saved.types.get(name) != types.get(name):
            got = f"{name}: {saved.types.get(name)}, where {types.get(name)} follows"
            _fail("the layouts of a plan follow from its decisions", got)


def _fail(rule: str, got: str) -> NoReturn:
    raise InvalidInput(rule, got=got, remedy=_REMEDY)
