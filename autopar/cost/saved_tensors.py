"""Saved tensors: what autograd keeps from forward to backward, and where it is counted.

In a cost graph a kept tensor is counted on one edge: where it is made, or where it is moved to. A
view keeps the tensor it looks at, so that what its readers keep is kept of its own input.

In a rewritten graph `kept_by` says what one operator keeps. A program, and each stage of one, keeps
what its operators keep, every storage once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.capture.origins import copied_parameter
from autopar.cost.operators import ShardSizes
from autopar.mesh import Mesh
from autopar.strategies.node_info import flat, info
from autopar.strategies.registry import is_view
from autopar.strategies.results import maker, place_of, tensor_arguments, tensors_of
from autopar.strategies.rule import Facts

Storage = tuple[fx.Node, int | str]


class SavedTensors:
    """Which reader keeps what, in one captured graph."""

    def __init__(self, facts: Mapping[str, Facts | None], readers: Mapping[str, Sequence]) -> None:
        self.facts, self.readers = facts, readers
        self._kept: dict[str, bool] = {}
        self._inputs: dict[int, tuple[int, ...]] = {}  # by id of facts

    def keeps(self, reader: str, position: int) -> bool:
        """Whether an operator keeps one of its inputs, itself or through views of it."""
        facts = self.facts[reader]
        if facts is None:
            return False
        if facts.is_view and position == 0:
            return self.is_kept(reader)
        if id(facts) not in self._inputs:
            self._inputs[id(facts)] = facts.rule.saved.inputs_for(facts.differentiable)
        return position in self._inputs[id(facts)]

    def is_kept(self, value: str) -> bool:
        """Whether some reader keeps a value."""
        if value not in self._kept:
            readings = self.readers.get(value, ())
            self._kept[value] = any(self.keeps(r.reader, r.position) for r in readings)
        return self._kept[value]

    def keeps_output(self, operator: str) -> bool:
        """Whether an operator keeps what it gives."""
        facts = self.facts[operator]
        return facts is not None and facts.rule.saved.output and any(facts.differentiable)


def storage(node: fx.Node) -> fx.Node:
    """The value whose memory `node` looks at: itself, unless it is a view."""
    while node.op == "call_function":
        movement = info(node).movement
        if not (is_view(node) or (movement is not None and movement.kind == "identity")):
            break
        node = node.all_input_nodes[0]
    return node


def kept_by(node: fx.Node, mesh: Mesh) -> dict[Storage, float]:
    """The bytes that an operator keeps for its backward, by storage.

    A storage is a call and which of its results it is of, or a further tensor of the operator. What
    comes from outside the program is held anyway, and a gathered parameter is gathered again.
    """
    if node.op != "call_function" or not info(node).differentiable:
        return {}
    read = tensor_arguments(node)
    values = [storage(read[i]) for i in info(node).saved if i < len(read)]
    if info(node).saves_output:
        values.append(storage(node))
    kept: dict[Storage, float] = {
        (maker(value), place): float(type_.local_bytes(mesh))
        for value in values
        if value.op != "placeholder" and copied_parameter(value) is None
        for place, type_ in enumerate(flat(info(value).type), place_of(value))
    }
    rule, strategy = info(node).rule, info(node).strategy
    if rule is None or strategy is None or info(node).start_of is not None:
        return kept  # a part keeps its inputs
    pieces = ShardSizes(rule, [strategy], mesh)
    dtype = tensors_of(node)[0].dtype
    for number, extra in enumerate(rule.saved.extra):
        kept[node, f"extra {number}"] = float(pieces.bytes(extra, dtype)[0])
    return kept


def local_bytes(node: fx.Node, mesh: Mesh) -> float:
    """Of one rank's piece of a value."""
    return float(info(node).type.local_bytes(mesh))
