"""Left out: of many calls of equal blocks in a row a few are written out, and the others counted.

    again 0, again 1, again 2, again 3, ..., again 95      in what export gives
    again 0, again 1, again 2, again 93, again 94, again 95

That the blocks are equal is proved (repeated.py). The number in the names of modules tells how many
are missing between two that are written; whoever reads the last of the missing ones reads the last
one before them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.source import of_stack
from autopar.capture.templates import AGAIN
from autopar.program.rows import rows

_BEFORE, _AFTER = 4, 4  # that are written: some of these may read or be read otherwise
_FEWEST = 4  # that are worth leaving out


@dataclass(frozen=True)
class LeftOut:
    """The calls of an exported graph that are not written out."""

    # With the ones that stand for them.
    twins: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    paths: Collection[str] = ()  # of their modules

    def has(self, name: str) -> bool:
        """Return whether a parameter or buffer is of a block that is left out."""
        parts = name.split(".")
        return any(".".join(parts[:count]) in self.paths for count in range(1, len(parts)))


def left_out(graph: fx.Graph) -> LeftOut:
    """Return what need not be written out of an exported graph."""
    twins = dict[fx.Node, fx.Node]()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for row in rows(calls, _facts, lambda given: given):
        targets = {node.target for node in row.inside}
        is_of_blocks = AGAIN in targets and targets <= {AGAIN, operator.getitem}
        if is_of_blocks and row.count >= _BEFORE + _AFTER + _FEWEST:
            first = row.start + _BEFORE * row.period
            for at in range(first, row.end - _AFTER * row.period):
                twins[calls[at]] = calls[first - row.period + (at - first) % row.period]
    return LeftOut(twins, {str(node.args[1]) for node in twins if node.target is AGAIN})


def _facts(node: fx.Node) -> Hashable:
    """Return what a call of an exported graph is, wherever it stands."""
    if node.target is AGAIN:
        number, _, forms, _ = node.args
        return AGAIN, number, forms, of_stack(node.meta.get("stack_trace"))
    if node.target is operator.getitem:
        return node.target, node.args[1]
    return node
