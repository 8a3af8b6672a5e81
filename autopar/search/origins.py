"""Origins: values that follow from the inputs alone, and values made of parameters alone.

What needs no gradient and follows from the model's inputs (positions, masks, shifted labels) is the
prologue: it runs whole on every rank where that costs next to nothing, and then every piece of it
is at hand everywhere. Decided one by one, such values would tie all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.captured import Captured
from autopar.search.candidates import Kinds, uncut
from autopar.strategies.results import is_result, maker

# The part of all computation that running the prologue whole on every rank may add.
MOST_SLACK = 2e-3
MOST_STEPS = 3  # from a parameter to a value that is made of it


@dataclass
class Prologue:
    """The operators that all ranks run whole."""

    names: set[str] = field(default_factory=set)
    slack: float = 0.0  # seconds that a plan with a cut prologue could be faster, at most


def find_prologue(
    captured: Captured, calls: Sequence[fx.Node], kinds: Kinds, asked: Collection[str]
) -> Prologue:
    """The prologue of a program, without what annotations ask about."""
    offers = [kinds.candidates(node) for node in calls]
    budget = MOST_SLACK * sum(candidates.least for candidates in offers)
    prologue = Prologue()
    for node, candidates in zip(calls, offers):
        if node.name in asked or node.meta["differentiable"]:
            continue
        if all(is_whole(value, captured, prologue) for value in kinds.inputs(node)):
            cost = candidates.cost
            more = float(cost[uncut(candidates)]) - candidates.least
            if prologue.slack + more <= budget:
                prologue.slack += more
                prologue.names.add(node.name)
    return prologue


def is_whole(value: fx.Node, captured: Captured, prologue: Prologue) -> bool:
    """Whether every rank has all of a value anyway."""
    if value.op == "placeholder":
        return value.name not in captured.parameters and not value.meta["differentiable"]
    return maker(value).name in prologue.names


def is_of_parameters(value: fx.Node, captured: Captured) -> bool:
    """Whether a value is a parameter, or each of its elements comes from parameters alone.

    Its gradient may be summed over ranks when backward has gone past it."""
    return _comes_from(value, lambda placeholder: placeholder.name in captured.parameters)


def is_made_of_parameters(value: fx.Node) -> bool:
    """The same of a node in a program, whose placeholders know what they are."""
    return _comes_from(value, lambda placeholder: placeholder.meta["origin"][0] == "parameter")


def _comes_from(
    value: fx.Node, is_parameter: Callable[[fx.Node], bool], steps: int = MOST_STEPS
) -> bool:
    if value.op == "placeholder":
        return is_parameter(value)
    if value.op != "call_function" or is_result(value) or not steps:
        return False
    learned = [argument for argument in value.all_input_nodes if argument.meta["differentiable"]]
    size = value.meta["val"].numel()
    return bool(learned) and all(
        argument.meta["val"].numel() == size and _comes_from(argument, is_parameter, steps - 1)
        for argument in learned
    )
