"""Origins: values that are made of parameters alone, and copies of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch
from torch import fx

from autopar.capture.captured import Captured
from autopar.states import StateBytes
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results, is_result

MOST_STEPS = 3  # from a parameter to a value that is made of it


def is_of_parameters(value: fx.Node, captured: Captured) -> bool:
    """Whether a value is a parameter, or each of its elements comes from parameters alone.

    Its gradient may be summed over ranks when backward has gone past it."""
    return _comes_from(value, lambda placeholder: placeholder.name in captured.parameters)


def made_without_inputs(graph: fx.Graph, captured: Captured) -> set[fx.Node]:
    """Return the values of a program of `captured` that follow from no input of the model."""
    values = set[fx.Node]()
    for node in graph.nodes:
        is_input = node.op == "placeholder" and node.name in captured.inputs
        if not is_input and values.issuperset(node.all_input_nodes):
            values.add(node)
    return values


def is_made_of_parameters(value: fx.Node) -> bool:
    """The same of a node in a program, whose placeholders know what they are."""
    return _comes_from(value, lambda placeholder: info(placeholder).origin[0] == "parameter")


Shares = tuple[tuple[fx.Node, float], ...]  # parameters, with a part of each


def summed_shares(graph: fx.Graph, of_weights: set[fx.Node]) -> dict[fx.Node, Shares]:
    """Return the parameters whose gradients are summed where a value's readers ask for its sum.

    The value is one of those `made_without_inputs`. What is read of one parameter by
    several such values is summed once: each has a share by its size."""
    made_of = dict[fx.Node, dict[fx.Node, None]]()  # the parameters in their order
    for node in graph.nodes:
        if node in of_weights and info(node).differentiable:
            before = [made_of[v] for v in node.all_input_nodes if v in made_of]
            made_of[node] = dict.fromkeys([node] if node.op == "placeholder" else chain(*before))
    sizes = {
        value: info(value).val.numel()
        for value in made_of
        if not has_results(value) and not of_weights.issuperset(value.users)
    }
    totals = Counter[fx.Node]()
    for value, size in sizes.items():
        for parameter in made_of[value]:
            totals[parameter] += max(size, 1)
    return {
        value: tuple((p, max(size, 1) / totals[p]) for p in made_of[value])
        for value, size in sizes.items()
        if value.op != "placeholder" or info(value).state_bytes is None
    }


def state_bytes(parameter: fx.Node) -> StateBytes:
    """What training keeps for each of its elements."""
    return info(parameter).state_bytes or StateBytes.of(info(parameter).val.dtype)


def copied_parameter(value: fx.Node) -> fx.Node | None:
    """The parameter of which a value is a copy that comes and goes: gathered, or cast."""
    node = value
    while node.op == "call_function" and _is_way(node):
        (node,) = node.all_input_nodes
    if node is value or node.op != "placeholder":
        return None
    if info(node).places is not None:
        return node if value in taken_copies(node) else None
    return node if info(node).state_bytes is not None else None


def _is_way(node: fx.Node) -> bool:
    return info(node).movement is not None or node.target is torch.ops.aten.to.dtype


def gathered_parameter(node: fx.Node) -> fx.Node | None:
    """The parameter that a movement gathers from where it is stored for those who read it."""
    passed = []
    while info(node).movement is not None:
        (node,) = node.all_input_nodes
        passed.append(node)
    places = info(node).places
    is_there = places is None or any(info(v).type.layout == places.working for v in passed)
    return None if is_there else node


def copies_behind(parameter: fx.Node) -> list[fx.Node]:
    """The all-gathers, and the cast, that a parameter goes through before its readers, who share
    them. A cast is one by a precision: what a model casts itself is for its own program to do."""
    found, node = list[fx.Node](), parameter
    is_cast = info(parameter).state_bytes is None
    while len(node.users) == 1:
        (node,) = node.users
        movement = info(node).movement
        if movement is not None and movement.kind == "all_gather":
            found.append(node)
        elif node.target is torch.ops.aten.to.dtype and not is_cast:
            is_cast = True
            found.append(node)
        else:
            break
    return found


def taken_copies(node: fx.Node) -> list[fx.Node]:
    """The gathers and casts behind a parameter that the runtime does."""
    places, found = info(node).places, list[fx.Node]()
    assert places is not None
    for copy in copies_behind(node):
        movement, after = info(copy).movement, info(copy).type.layout
        is_summed = movement is None or movement.pending or not info(node).differentiable
        if not is_summed or not after.nests_with(places.optimizer):
            break
        found.append(copy)
    return found


def moved_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which a movement moves its value: what is read in another dtype than parameters
    are kept in is cast before it is gathered."""
    parameter, reader = gathered_parameter(node), node
    if parameter is None or info(parameter).state_bytes is None:
        return info(node).type.dtype
    while info(reader).movement is not None and len(reader.users) == 1:
        (reader,) = reader.users
    is_cast = reader.target is torch.ops.aten.to.dtype
    return info(reader if is_cast else node).type.dtype


def _comes_from(
    value: fx.Node, is_parameter: Callable[[fx.Node], bool], steps: int = MOST_STEPS
) -> bool:
    if value.op == "placeholder":
        return is_parameter(value)
    if value.op != "call_function" or is_result(value) or has_results(value) or not steps:
        return False
    learned = [argument for argument in value.all_input_nodes if info(argument).differentiable]
    size = info(value).val.numel()
    return bool(learned) and all(
        info(argument).val.numel() == size and _comes_from(argument, is_parameter, steps - 1)
        for argument in learned
    )
