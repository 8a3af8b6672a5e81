"""Linear reductions: a linear's input gradient is reduced while weight gradients are computed.

For graphs of one rank that run eagerly, after `localize`. A movement whose backward is a reduction,
and the linears that alone read it, become one call (`collectives/deferred_linears.py`):

    x' = identity(x, "tp"); y = linear(x', w); z = linear(x', v)
    y, z = linears(x, identity, ("tp",), w, None, v, None)

A split backward has separated the two already, and is left as it is; so is a compiled program. A
collective of backward comes before others here, so all ranks do the same, also without elements.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autopar.collectives.deferred_linears import STARTS, linears
from autopar.cost.deferred_reductions import mergeable_linears
from autopar.passes.pass_context import LocalContext
from autopar.strategies.node_info import info


def hide_reductions(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Join every such movement and its readers, in place."""
    if context.is_differentiated_once and not context.is_split and not context.compiled:
        for readers in mergeable_linears(graph.nodes):
            movement = readers[0].all_input_nodes[0]
            if movement.target in STARTS:
                read = [value for reader in readers for value in reader.all_input_nodes]
                _join(movement, readers, max(read))
    return graph


def _join(movement: fx.Node, readers: list[fx.Node], last: fx.Node) -> None:
    """Replace a movement and its readers by one call, after the `last` node that they read."""
    graph = movement.graph
    value, *arguments = movement.args
    pairs = [(*reader.args[1:], None)[:2] for reader in readers]
    parameters = [parameter for pair in pairs for parameter in pair]
    call: Any = (value, movement.target, tuple(arguments), *parameters)
    with graph.inserting_after(last):
        joined = graph.call_function(linears, call)
    joined.meta = {**readers[0].meta, "rule": None}
    results = [joined]
    if len(readers) > 1:
        values: Any = tuple(info(reader).val for reader in readers)
        info(joined).update(val=values, away={})
        with graph.inserting_after(joined):
            results = [
                graph.call_function(operator.getitem, (joined, index))
                for index in reversed(range(len(readers)))
            ][::-1]
    for reader, result in zip(readers, results):
        if result is not joined:
            result.meta = dict(reader.meta)
        reader.replace_all_uses_with(result)
        graph.erase_node(reader)
    graph.erase_node(movement)
