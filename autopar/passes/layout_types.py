"""Layout types: a value gets the layout that its strategy fixes, a reader the layouts it wants.

Sets `type` (shape, dtype and layout), `wants` (a placement for each tensor input) and, on
placeholders, `origin`. On operators `calls` has what they are priced by: the call and its strategy.
Whatever a later pass makes of an operator keeps its calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import fx

from autopar.capture.captured import Captured
from autopar.cost.operator_costs import facts_of
from autopar.layout import ALL_PLACES, Layout, Placement
from autopar.passes.flow import copy_subgraph
from autopar.passes.pass_context import RewriteContext
from autopar.search.decisions import Decisions
from autopar.strategies import Strategy, tensor_inputs
from autopar.strategies.node_info import SEQUENCE, flat_values, info
from autopar.strategies.results import has_results, is_result, maker, result_index
from autopar.strategies.rule import Facts
from autopar.tensor_type import TensorType


def assign_types(source: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Copy the captured graph, with the decisions written on its nodes."""
    captured, decisions = context.captured, context.decisions
    graph = copy_subgraph(source, source.nodes)
    facts: dict[int, Facts] = {}  # of calls that are alike
    by_strategy: dict[tuple[int, Strategy], dict[str, object]] = {}  # what is said of these
    shared_readers = {reader for _, reader, _ in decisions.ways}
    for node in graph.nodes:
        if node.op == "placeholder":
            info(node).origin = _origin(captured, node.name)
            if node.name in captured.parameters:
                places, on_host = decisions.parameter(node.name), info(node).on_host
                info(node).places = replace(places, on_host=ALL_PLACES) if on_host else places
            _set_type(node, decisions.placeholders[node.name])
        elif is_result(node):
            call, place = maker(node), result_index(node)
            info(node).update(type=flat_values(info(call).type)[place], wants=())
        elif node.op == "call_function":
            rule, kind = captured.priced[node.name], captured.classes[node.name]
            if rule is not None and kind not in facts:
                facts[kind] = facts_of(node, rule, tensor_inputs(node))
            _type_operator(node, facts.get(kind), decisions, by_strategy)
            if node.name in shared_readers:
                _share_ways(node, decisions)
    _type_output(captured, graph, decisions)
    return graph


def _under(node: fx.Node, facts: Facts, strategy: Strategy) -> dict[str, object]:
    """Return the marks that the rule of an operator gives it under a strategy."""
    rule, signature = facts.rule, facts.rule.signature(strategy)
    learns = [info(value).differentiable for value in tensor_inputs(node)]
    saved = rule.saved_under(strategy)
    return {
        "wants": signature.wants(learns),
        "rule": rule,
        "strategy": strategy,
        "saved": saved.inputs_for(learns),
        "saves_output": saved.output,
        "calls": ((facts, strategy),),
        "type": _type_of(node, *signature.outputs),
    }


def _type_operator(
    node: fx.Node,
    facts: Facts | None,
    decisions: Decisions,
    by_strategy: dict[tuple[int, Strategy], dict[str, object]],
) -> None:
    marked_layout = decisions.fixed.get(node.name)
    if marked_layout is not None:
        info(node).wants = (Placement(marked_layout),)
        _set_type(node, marked_layout)
    elif facts is not None:
        key = id(facts), decisions.strategies.get(node.name, Strategy())
        if key not in by_strategy:
            by_strategy[key] = _under(node, facts, key[1])
        info(node).update(**by_strategy[key])
    else:
        inputs = tensor_inputs(node)
        info(node).wants = tuple(Placement.whole(info(value).val.ndim) for value in inputs)
        layouts = (Layout.replicated(getattr(value, "ndim", 0)) for value in info(node).values)
        _set_type(node, *layouts)


def _share_ways(node: fx.Node, decisions: Decisions) -> None:
    info(node).ways = {
        (value.name, want): way
        for position, (value, want) in enumerate(zip(tensor_inputs(node), info(node).wants))
        if (way := decisions.ways.get((value.name, node.name, position)))
    }


def _type_output(captured: Captured, graph: fx.Graph, decisions: Decisions) -> None:
    output = graph.output_node()
    mutated = {node: buffer for buffer, node in captured.mutations.items()}
    placeholder_of = {name: placeholder for placeholder, name in captured.buffers.items()}
    wants: list[Placement] = []
    results = cast(tuple[fx.Node, ...], output.args[0])
    first_mutation = len(results) - len(captured.mutations)
    for index, value in enumerate(results):
        layout = info(value).type.layout
        if index >= first_mutation:
            layout = decisions.placeholders[placeholder_of[mutated[value.name]]]
        wants.append(Placement(layout.with_partial(())))
    info(output).wants = tuple(wants)


def _set_type(node: fx.Node, *layouts: Layout) -> None:
    info(node).type = _type_of(node, *layouts)  # type: ignore[assignment]


def _type_of(node: fx.Node, *layouts: Layout) -> object:
    types = tuple(
        TensorType.of(value, layout) if isinstance(value, torch.Tensor) else None
        for value, layout in zip(info(node).values, layouts)
    )
    return types if has_results(node) else types[0]


def _origin(captured: Captured, placeholder: str) -> tuple[str, str]:
    for kind, names in (("parameter", captured.parameters), ("buffer", captured.buffers)):
        if placeholder in names:
            return kind, names[placeholder]
    if placeholder in captured.sequence_buffers:
        return SEQUENCE, placeholder
    return ("constant" if placeholder in captured.constants else "input"), placeholder
