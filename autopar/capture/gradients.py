"""Gradients: which values the backward of a result reaches. It is known before anything runs.

A gradient flows from every value that takes one (`differentiable`) to those of its inputs that do:
where autograd would not pass it on, capture has put a `detach`.

What *learns* gets a gradient in a step: the backward of what a step differentiates reaches it. That
is the loss; where a model has none, each of its outputs, which its caller differentiates. All that
a plan says of backward (seconds, bytes, buckets, places of states) is of what learns. What takes a
gradient and does not learn (a head that the loss does not read) has movements for it in the
program, as a call of a module with a loss may be differentiated by any output, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from autopar.strategies.node_info import info


def reached(results: Iterable[fx.Node]) -> set[fx.Node]:
    """The values that get a gradient when `results` do: defined, though it may be zero."""
    found: set[fx.Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in found and info(node).differentiable:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def mark_learning(graph: fx.Graph, differentiated: Sequence[int]) -> None:
    """Write on every value whether it learns, given which of the results a step differentiates."""
    results: Any = graph.output_node().args[0]
    found = reached(results[place] for place in differentiated)
    for node in graph.nodes:
        info(node).learns = node in found
    info(graph.output_node()).learns = bool(found)


def passed_over(result: object, inputs: Iterable[Tensor]) -> list[Tensor]:
    """Those of `inputs` that take a gradient, and get none from the operator that made `result`."""
    results = [result] if isinstance(result, Tensor) else result
    assert isinstance(results, (list, tuple))
    wanted = {get_gradient_edge(x)[:2]: x for x in inputs if x.requires_grad}
    met: set[tuple[Any, int]] = set()
    waiting: list[tuple[Any, int]] = [get_gradient_edge(v)[:2] for v in results if _learns(v)]
    while waiting:
        edge = waiting.pop()
        if edge not in met and edge[0] is not None:
            met.add(edge)
            if edge not in wanted:
                waiting.extend(edge[0].next_functions)
    return [x for edge, x in wanted.items() if edge not in met]


def _learns(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
