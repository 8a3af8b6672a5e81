"""Readers of a program's values, as far as backward depends on them (`memory_timeline.py`).

These functions find the reader of a parameter whose backward comes last, how long a value without a
gradient is kept, and the values that are computed from parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.strategies.node_info import info
from autopar.strategies.results import maker


def first_readers(graph: fx.Graph, calls: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return for each parameter the first call that reads it and may give it a gradient."""
    place = {node: at for at, node in enumerate(calls)}
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        readers = [user for user in node.users if user in place and info(user).differentiable]
        if info(node).places is not None and readers:
            first[node] = min(readers, key=place.__getitem__)
    return first


def last_needed_by(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the last call that needs each differentiable call which does not learn.

    Nothing from which its backward could start is alive then; until then autograd keeps its inputs.
    """
    place = {node: at for at, node in enumerate(graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        known = info(node)
        if node.op == "call_function" and known.differentiable and not known.learns:
            ends = [last.get(user, user) for user in node.users]
            last[node] = maker(max(ends, key=place.__getitem__, default=node))
    return last


def made_of_parameters(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the differentiable values that are computed from parameters and from no input."""
    of_parameters: set[fx.Node] = set()
    free: set[fx.Node] = set()  # computed from neither
    for node in graph.nodes:
        if node.op == "placeholder":
            kind = info(node).origin[0]
            of_parameters |= {node} if kind == "parameter" else set()
            free |= set() if kind in ("parameter", "input", "received") else {node}
        elif all(value in of_parameters or value in free for value in node.all_input_nodes):
            is_free = free.issuperset(node.all_input_nodes)
            (free if is_free else of_parameters).add(node)
    return frozenset(node for node in of_parameters if info(node).differentiable)
