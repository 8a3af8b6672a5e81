"""Prologue: values that follow from the inputs alone.

What needs no gradient and follows from the model's inputs (positions, masks, shifted labels) is the
prologue: it runs whole on every rank where that costs next to nothing, and then every piece of it
is at hand everywhere. Decided one by one, such values would tie all layers together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.captured import Captured
from autopar.search.candidates import NodeClasses, uncut
from autopar.strategies.node_info import info
from autopar.strategies.results import maker

# The part of all computation that running the prologue whole on every rank may add.
MOST_SLACK = 2e-3


@dataclass
class Prologue:
    """The operators that all ranks run whole."""

    names: set[str] = field(default_factory=set)
    slack: float = 0.0  # seconds that a plan with a cut prologue could be faster, at most


def find_prologue(
    captured: Captured, calls: Sequence[fx.Node], classes: NodeClasses, annotated: Collection[str]
) -> Prologue:
    """Find the prologue of a program, without the `annotated` values."""
    offers = [classes.candidates(node) for node in calls]
    times = [info(node).count for node in calls]
    budget = MOST_SLACK * sum(option.least * count for option, count in zip(offers, times))
    prologue = Prologue()
    for node, candidates in zip(calls, offers):
        if node.name in annotated or info(node).differentiable:
            continue
        if all(is_whole(value, captured, prologue) for value in classes.inputs(node)):
            cost = candidates.cost
            slowdown = (float(cost[uncut(candidates)]) - candidates.least) * info(node).count
            if prologue.slack + slowdown <= budget:
                prologue.slack += slowdown
                prologue.names.add(node.name)
    return prologue


def is_whole(value: fx.Node, captured: Captured, prologue: Prologue) -> bool:
    """Return whether every rank has all of a value anyway, or any piece that its readers want."""
    if value.op == "placeholder":
        return value.name not in captured.parameters and not info(value).differentiable
    return maker(value).name in prologue.names
