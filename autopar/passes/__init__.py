"""Passes: graph and decisions in, graph out, one file each, in the order of `rewrite`."""

from __future__ import annotations

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.verifier import verify
from autopar.collectives import Price
from autopar.passes.fusion import fuse_biases
from autopar.passes.gradient_sync import hoist_gradient_sync
from autopar.passes.kernels import swap_kernels
from autopar.passes.localize import localize
from autopar.passes.redistribution import insert_movements, measure_movements
from autopar.passes.types import assign_types
from autopar.search.decisions import Decisions

__all__ = ["localize", "rewrite"]


def rewrite(captured: Captured, decisions: Decisions, price: Price) -> fx.Graph:
    """The program that all ranks run: every collective a node, every value with its type."""
    mesh = decisions.mesh
    graph = assign_types(captured, decisions)
    verify(graph, "typed", mesh)
    graph = swap_kernels(graph, mesh)
    verify(graph, "typed", mesh)
    graph = insert_movements(graph, mesh, price)
    verify(graph, "moved", mesh)
    graph = hoist_gradient_sync(graph)
    verify(graph, "moved", mesh)
    graph = fuse_biases(graph)
    verify(graph, "moved", mesh)
    measure_movements(graph, mesh)
    return graph
