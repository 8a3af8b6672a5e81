"""Keeping: what autograd keeps from forward to backward, and where it is counted.

In a cost graph a kept tensor is counted on one edge: where it is made, or where it is moved to. A
view keeps the tensor it looks at, so that what its readers keep is kept of its own input.

In a rewritten graph `kept_by` says what one operator keeps. A program, and each stage of one, keeps
what its operators keep, every storage once: `kept_by_stages` has it for all stages there could be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.cost.operators import Pieces
from autopar.mesh import Mesh
from autopar.search.candidates import Candidates, is_view
from autopar.search.flow import Flow, tensor_arguments
from autopar.search.spans import Spans
from autopar.strategies import Rule
from autopar.strategies.results import flat, maker, place_of, tensors_of, values_of

Storage = tuple[fx.Node, int | str]


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


def kept_by(node: fx.Node, mesh: Mesh) -> dict[Storage, float]:
    """The bytes that an operator keeps for its backward, by storage.

    A storage is a call and which of its results it is of, or a further tensor of the operator. What
    comes from outside the program is held anyway.
    """
    if node.op != "call_function" or not node.meta["differentiable"]:
        return {}
    read = tensor_arguments(node)
    values = [storage(read[i]) for i in node.meta.get("saved", ()) if i < len(read)]
    if node.meta.get("saves_output"):
        values.append(storage(node))
    kept: dict[Storage, float] = {
        (maker(value), place): float(type_.local_bytes(mesh))
        for value in values
        if value.op != "placeholder"
        for place, type_ in enumerate(flat(value.meta["type"]), place_of(value))
    }
    rule, strategy = node.meta.get("rule"), node.meta.get("strategy")
    if rule is None or strategy is None or "start_of" in node.meta:  # a part keeps its inputs
        return kept
    pieces = Pieces(rule, [strategy], mesh)
    itemsize = tensors_of(node)[0].dtype.itemsize
    for number, dims in enumerate(rule.saved.extra):
        kept[node, f"extra {number}"] = float(pieces.elements(dims)[0]) * itemsize
    return kept


def local_bytes(node: fx.Node, mesh: Mesh) -> float:
    """Of one rank's piece of a value."""
    return float(node.meta["type"].local_bytes(mesh))


def kept_by_stages(flow: Flow, mesh: Mesh) -> tuple[Spans, Spans]:
    """What stages keep of one slice from forward to backward, besides what they received.

    Then what they keep from the gradients of their inputs to those of their weights.
    """
    keepers: dict[Storage, set[int]] = {}  # the places of a storage's readers
    later: dict[Storage, set[int]] = {}
    sizes: dict[Storage, float] = {}
    put_off = {flow.place[node] for node in flow.weight_inputs}
    for node, places in flow.read_at.items():
        kept, weights = kept_by(node, mesh), flow.weight_inputs.get(node)
        sizes |= kept
        waits = weights.product if weights is not None else flow.is_weight(node)
        for key in kept:
            keepers.setdefault(key, set()).update(places)
            if waits:
                later.setdefault(key, set()).update(put_off.intersection(places))
        if weights is not None:
            waiting = values_of(node) if weights.product else flow.weights_of(node)
            for value in [value for value in waiting if value.meta["differentiable"]]:
                key = value, f"gradient of {node.name}"
                later[key], sizes[key] = set(places), local_bytes(value, mesh)
    whole, weight_halves = Spans(), Spans()
    for key, readers in keepers.items():
        made = flow.place.get(key[0])
        if made is not None:  # a stage after that received it
            whole.all_of((made, min(readers)), sizes[key])
        else:
            whole.any_of(readers, sizes[key])
    for key, readers in later.items():
        weight_halves.any_of(readers, sizes[key])
    return whole, weight_halves
