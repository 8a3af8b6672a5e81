"""Passes: graph and context in, graph out, one file each, in the order of two tables.

`PASSES` rewrite the program that all ranks run. `LOCAL_PASSES` rewrite what one rank runs of a
stage, once it is localized, where it runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.verifier import verify
from autopar.collectives import Price
from autopar.passes.eager_sums import choose_sums
from autopar.passes.early_sums import settle_small_sums
from autopar.passes.flow import copy_subgraph
from autopar.passes.fusion import fuse_biases
from autopar.passes.gathers import mark_copies, take_gathers
from autopar.passes.gradient_sync import hoist_gradient_sync
from autopar.passes.insert_movements import insert_movements, measure_movements
from autopar.passes.kernels import swap_kernels
from autopar.passes.layout_types import assign_types
from autopar.passes.linear_reductions import hide_reductions
from autopar.passes.localize import localize
from autopar.passes.parameter_gathers import gather_parameters
from autopar.passes.pass_context import LocalContext, ParameterCopies, RewriteContext
from autopar.passes.recombine import recombine
from autopar.passes.recompute_marks import mark_recomputed
from autopar.search.decisions import Decisions
from autopar.strategies.node_info import info

__all__ = [
    "LOCAL_PASSES",
    "PASSES",
    "LocalContext",
    "ParameterCopies",
    "change_recomputation",
    "change_state_places",
    "localize",
    "rewrite",
    "run_local_passes",
]

PassFunction = Callable[[fx.Graph, Any], fx.Graph]


@dataclass(frozen=True)
class Pass:
    """Describe one step of a table: its function, its place, what its result satisfies."""

    run: PassFunction  # with the `RewriteContext` of its table
    requires: tuple[PassFunction, ...]  # what must come before it
    invariants: str  # the stage whose invariants the verifier asks of the graph after it


PASSES = (
    Pass(assign_types, (), "typed"),
    Pass(swap_kernels, (assign_types,), "typed"),
    Pass(insert_movements, (assign_types, swap_kernels), "moved"),
    Pass(hoist_gradient_sync, (insert_movements,), "moved"),
    Pass(fuse_biases, (insert_movements,), "moved"),
    Pass(gather_parameters, (hoist_gradient_sync, fuse_biases), "moved"),
    Pass(measure_movements, (insert_movements, gather_parameters), "moved"),
    Pass(mark_recomputed, (measure_movements,), "moved"),
)
LOCAL_PASSES = (
    Pass(take_gathers, (), "local"),
    Pass(recombine, (), "local"),
    Pass(settle_small_sums, (), "local"),
    Pass(hide_reductions, (take_gathers,), "local"),
    Pass(choose_sums, (settle_small_sums, hide_reductions), "local"),
    Pass(mark_copies, (take_gathers, recombine, choose_sums), "local"),
)


def rewrite(
    captured: Captured, decisions: Decisions, price: Price, *, verify_each: bool = True
) -> fx.Graph:
    """Return the program that all ranks run: every collective a node, every value typed.
    It is verified after each pass, or without `verify_each` after the last."""
    context = RewriteContext(captured, decisions, price)
    return _run(PASSES, captured.graph, context, verify_each=verify_each)


def change_recomputation(
    graph: fx.Graph, captured: Captured, decisions: Decisions, price: Price
) -> fx.Graph:
    """Return a rewritten program of the same layouts with other regions recomputed."""
    copy = copy_subgraph(graph, graph.nodes)
    return mark_recomputed(copy, RewriteContext(captured, decisions, price))


def change_state_places(
    graph: fx.Graph, captured: Captured, decisions: Decisions, price: Price
) -> fx.Graph:
    """Return a rewritten program of the same layouts with these decisions' places of states.
    Its parameters have had one place each so far."""
    context, copy = RewriteContext(captured, decisions, price), copy_subgraph(graph, graph.nodes)
    for node in copy.find_nodes(op="placeholder"):
        if node.name in decisions.apart:
            info(node).places = decisions.apart[node.name]
    if not any(places.storage != places.working for places in decisions.apart.values()):
        return copy
    copy = measure_movements(gather_parameters(copy, context), context)
    copy = mark_recomputed(copy, context)
    verify(copy, "moved", context.mesh)
    return copy


def run_local_passes(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Rewrite one rank's program in place, to few calls and little waiting in eager mode."""
    return _run(LOCAL_PASSES, graph, context)


def _run(
    table: tuple[Pass, ...],
    graph: fx.Graph,
    context: RewriteContext | LocalContext,
    *,
    verify_each: bool = True,
) -> fx.Graph:
    for pass_ in table:
        graph = pass_.run(graph, context)
        if verify_each or pass_ is table[-1]:
            verify(graph, pass_.invariants, context.mesh)
    return graph
