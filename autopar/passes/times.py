"""Times: in a program that stands for a longer one, which nodes stand for several.

What moves values into a block may stand in the block before: from the first call of the block that
stands for others to the first of the next one is what each of them adds.
"""

from __future__ import annotations

from torch import fx

from autopar.passes.pass_context import RewriteContext
from autopar.strategies.node_info import info


def mark_times(graph: fx.Graph, context: RewriteContext) -> fx.Graph:
    """Mark the calls of one period, with how often it runs."""
    captured, is_inside, times = context.captured, False, 1
    for node in graph.nodes if captured.is_folded else ():
        if node.op != "call_function":
            continue
        if node.name in captured.classes:
            times = info(node).count
            is_inside = times > 1
        if is_inside:
            info(node).count = times
        else:
            node.meta.pop("count", None)
    return graph
