"""Passes: graph and decisions in, graph out, one file each, in the order of `PASSES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.verifier import verify
from autopar.collectives import Price
from autopar.passes.fusion import fuse_biases
from autopar.passes.gradient_sync import hoist_gradient_sync
from autopar.passes.kernels import swap_kernels
from autopar.passes.localize import localize
from autopar.passes.redistribution import insert_movements, measure_movements
from autopar.passes.setting import Setting
from autopar.passes.types import assign_types
from autopar.search.decisions import Decisions

__all__ = ["PASSES", "localize", "rewrite"]

Run = Callable[[fx.Graph, Setting], fx.Graph]


@dataclass(frozen=True)
class Pass:
    """One step of `rewrite`."""

    run: Run
    after: tuple[Run, ...]  # what must come before it
    gives: str  # the stage whose invariants the verifier asks of the graph after it


PASSES = (
    Pass(assign_types, (), "typed"),
    Pass(swap_kernels, (assign_types,), "typed"),
    Pass(insert_movements, (assign_types, swap_kernels), "moved"),
    Pass(hoist_gradient_sync, (insert_movements,), "moved"),
    Pass(fuse_biases, (insert_movements,), "moved"),
    Pass(measure_movements, (insert_movements, hoist_gradient_sync), "moved"),
)


def rewrite(captured: Captured, decisions: Decisions, price: Price) -> fx.Graph:
    """The program that all ranks run: every collective a node, every value with its type."""
    setting, graph = Setting(captured, decisions, price), captured.graph
    for step in PASSES:
        graph = step.run(graph, setting)
        verify(graph, step.gives, setting.mesh)
    return graph
