"""Regions with a checkpoint policy: which of their calls run again in backward.

What the policy saves stays, and so does what others read. Any other value that backward reads is
made again, from values that stay: `saved_throughout` counts these. A movement of a value that stays
stays itself, so that no collective runs twice for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from autopar.capture.origins import copied_parameter
from autopar.cost.value_storage import is_read_outside, source
from autopar.strategies.node_info import info


def calls_made_again(nodes: Sequence[fx.Node], saved: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the calls of a region with a policy that run again in backward.

    `saved`: the calls whose results backward reads."""
    members, staying = set(nodes), set[fx.Node]()
    for node in nodes:
        inputs = node.all_input_nodes
        is_saved = bool(info(node).policy_saves)
        if info(node).movement is not None:
            is_saved = source(inputs[0]) in staying
        if is_saved or copied_parameter(node) is not None or is_read_outside(node, members):
            staying.add(node)
    again, waiting = set[fx.Node](), list(saved)
    while waiting:
        node = waiting.pop()
        if node in members and node not in staying and node not in again:
            again.add(node)
            waiting += map(source, node.all_input_nodes)
    return again


def extend_spans(
    nodes: Sequence[fx.Node], spans: Mapping[tuple[fx.Node, int | str], list[float]]
) -> None:
    """Let recomputed values live from the first backward that needs others made of them.

    `nodes`: the region in order. `spans`: the first and the last place in the program at which a
    value is read, and its bytes; backward comes to the last place first."""
    needed, spans_of = dict[fx.Node, float](), defaultdict[fx.Node, list[list[float]]](list)
    for (node, _), span in spans.items():
        spans_of[node].append(span)
        needed[node] = max(needed.get(node, -1), span[1])
    for node in reversed(nodes):
        if node not in needed:
            continue
        for span in spans_of[node]:
            span[1] = needed[node]
        for value in map(source, node.all_input_nodes):
            if info(value).remade:
                needed[value] = max(needed.get(value, -1), needed[node])
