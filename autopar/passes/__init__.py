"""Passes: graph and setting in, graph out, one file each, in the order of two tables.

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
from autopar.cost.repeats import NO_EQUAL_BLOCKS, EqualBlocks
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
from autopar.passes.pass_setting import LocalSetting, ParameterCopies, Setting
from autopar.passes.recombine import recombine
from autopar.passes.recompute_marks import mark_recomputed
from autopar.passes.times import mark_times
from autopar.search.decisions import Decisions
from autopar.strategies.node_info import info

__all__ = [
    "LOCAL_PASSES",
    "PASSES",
    "LocalSetting",
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
    """One step of a table."""

    run: PassFunction  # with the `Setting` of its table
    after: tuple[PassFunction, ...]  # what must come before it
    gives: str  # the stage whose invariants the verifier asks of the graph after it


PASSES = (
    Pass(assign_types, (), "typed"),
    Pass(swap_kernels, (assign_types,), "typed"),
    Pass(insert_movements, (assign_types, swap_kernels), "moved"),
    Pass(hoist_gradient_sync, (insert_movements,), "moved"),
    Pass(fuse_biases, (insert_movements,), "moved"),
    Pass(gather_parameters, (hoist_gradient_sync, fuse_biases), "moved"),
    Pass(measure_movements, (insert_movements, gather_parameters), "moved"),
    Pass(mark_times, (fuse_biases, gather_parameters), "moved"),
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
    captured: Captured, decisions: Decisions, price: Price, *, each: bool = True
) -> fx.Graph:
    """The program that all ranks run: every collective a node, every value with its type.

    It is verified after each pass, or after the last, which gives what all of them give."""
    return _run(PASSES, captured.graph, Setting(captured, decisions, price), each)


def change_recomputation(
    graph: fx.Graph,
    captured: Captured,
    decisions: Decisions,
    price: Price,
    repeats: EqualBlocks = NO_EQUAL_BLOCKS,
) -> fx.Graph:
    """A rewritten program of the same layouts in which other regions are recomputed. `repeats`: its
    equal blocks, if none is yet."""
    made = copy_subgraph(graph, graph.nodes)
    return mark_recomputed(made, Setting(captured, decisions, price), repeats.moved_to(made))


def change_state_places(
    graph: fx.Graph, captured: Captured, decisions: Decisions, price: Price
) -> fx.Graph:
    """A rewritten program of the same layouts whose parameters have had one place so far, with the
    places of these decisions."""
    setting, found = Setting(captured, decisions, price), copy_subgraph(graph, graph.nodes)
    for node in found.find_nodes(op="placeholder"):
        if node.name in decisions.apart:
            info(node).places = decisions.apart[node.name]
    if not any(places.storage != places.working for places in decisions.apart.values()):
        return found
    found = mark_times(measure_movements(gather_parameters(found, setting), setting), setting)
    found = mark_recomputed(found, setting)
    verify(found, "moved", setting.mesh)
    return found


def run_local_passes(graph: fx.Graph, setting: LocalSetting) -> fx.Graph:
    """What one rank runs, in place: as few calls and as little waiting as eager code needs."""
    return _run(LOCAL_PASSES, graph, setting)


def _run(
    table: tuple[Pass, ...], graph: fx.Graph, setting: Setting | LocalSetting, each: bool = True
) -> fx.Graph:
    for step in table:
        graph = step.run(graph, setting)
        if each or step is table[-1]:
            verify(graph, step.gives, setting.mesh)
    return graph
