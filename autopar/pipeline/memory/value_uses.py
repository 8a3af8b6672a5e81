"""Who reads which value of a program, as far as backward depends on it (`memory_timeline.py`).

It tells which reader of a parameter comes last, how long a value without a gradient is kept, and
which values are computed from parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.strategies.node_info import info
from autopar.strategies.results import maker


def first_readers(graph: fx.Graph, calls: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Of each parameter the call that reads it first, of those that may give it a gradient."""
    place = {node: at for at, node in enumerate(calls)}
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        readers = [one for one in node.users if one in place and info(one).differentiable]
        if info(node).places is not None and readers:
            found[node] = min(readers, key=place.__getitem__)
    return found


def until(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Of calls that take a gradient and do not learn, the one after which nothing is there that
    backward would come from: till then autograd keeps what it would read."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        about = info(node)
        if node.op == "call_function" and about.differentiable and not about.learns:
            ends = [found.get(user, user) for user in node.users]
            found[node] = maker(max(ends, key=place.__getitem__, default=node))
    return found


def made_of_parameters(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values that take a gradient and are made of no input."""
    found: set[fx.Node] = set()
    free: set[fx.Node] = set()  # made of neither
    for node in graph.nodes:
        if node.op == "placeholder":
            kind = info(node).origin[0]
            found |= {node} if kind == "parameter" else set()
            free |= set() if kind in ("parameter", "input", "received") else {node}
        elif all(value in found or value in free for value in node.all_input_nodes):
            is_made = any(value in found for value in node.all_input_nodes)
            (found if is_made else free).add(node)
    return frozenset(node for node in found if info(node).differentiable)
