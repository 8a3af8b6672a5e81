"""Keeping: what autograd keeps of the inputs of operators until backward, and where it is counted.

In a cost graph a kept tensor is counted on one edge: where it is made, or where it is moved to. A
view keeps the tensor it looks at, so that what its readers keep is kept of its own input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.search.candidates import Candidates, is_view
from autopar.strategies import Rule


def kept_inputs(rule: Rule, learns: Sequence[bool]) -> tuple[int, ...]:
    """Which inputs an operator keeps: a factor of a product only if another factor learns."""
    factors = {next(iter(inputs)) for inputs in rule.passes if len(inputs) == 1}
    return tuple(
        index
        for index in rule.saved.inputs
        if index < len(learns)
        and any(on for other, on in enumerate(learns) if other != index or index not in factors)
    )


class Keeping:
    """Which reader keeps what, in one captured graph."""

    def __init__(self, offers: Mapping[str, Candidates], readers: Mapping[str, Sequence]) -> None:
        self.offers, self.readers = offers, readers
        self._kept: dict[str, bool] = {}
        self._inputs: dict[int, tuple[int, ...]] = {}  # by id of facts, which offers keep alive

    def keeps(self, reader: str, position: int) -> bool:
        """Whether an operator keeps one of its inputs, itself or through views of it."""
        facts = self.offers[reader].facts
        if facts is None:
            return False
        if facts.is_view and position == 0:
            return self.is_kept(reader)
        if id(facts) not in self._inputs:
            self._inputs[id(facts)] = kept_inputs(facts.rule, facts.differentiable)
        return position in self._inputs[id(facts)]

    def is_kept(self, value: str) -> bool:
        """Whether some reader keeps a value."""
        if value not in self._kept:
            readings = self.readers.get(value, ())
            self._kept[value] = any(self.keeps(r.reader, r.position) for r in readings)
        return self._kept[value]

    def keeps_output(self, operator: str) -> bool:
        """Whether an operator keeps what it gives."""
        facts = self.offers[operator].facts
        return facts is not None and facts.rule.saved.output and any(facts.differentiable)


def storage(node: fx.Node) -> fx.Node:
    """The value whose memory `node` looks at: itself, unless it is a view."""
    while node.op == "call_function":
        movement = node.meta.get("movement")
        if not (is_view(node) or (movement is not None and movement.kind == "identity")):
            break
        node = node.all_input_nodes[0]
    return node
