"""Joined: a batch that is joined of several, and what is computed of it.

    x = cat([a, b]); c, d = encoder(x).chunk(2)

No piece of the rows of `x` is one of the rows of `a` and of `b`: it is cut in parts, as what is
computed of it. The batch is followed from the inputs, through the rules of calls, and each value
says of how many parts its batch is (`info.parts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.program.equality import number_calls
from autopar.strategies import Dim, Rule, rule_of, tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result, maker, result_index, values_of
from autopar.strategies.rules.equal_parts import in_parts
from autopar.strategies.strategy import PartsCut, TensorCut


def mark_joined(graph: fx.Graph, inputs: Sequence[str | None]) -> None:
    """Write on values of how many parts their batch is, where it is of several."""
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    given = [nodes[name] for name in inputs if name is not None and info(nodes[name]).val.ndim]
    batch = info(given[0]).val.shape[0] if given else 0
    marking = _Marking(graph)
    for node in given:
        if batch > 1 and info(node).val.shape[0] == batch:
            marking.meet(node, 0, 1)
    marking.run()


@dataclass
class _Marking:
    """Values whose batch is known, in how many parts, and of which neighbours are to be told."""

    graph: fx.Graph
    classes: dict[str, int] = field(init=False)
    rules: dict[int, Rule | None] = field(default_factory=dict)
    met: set[tuple[fx.Node, int, int]] = field(default_factory=set)
    waiting: deque[tuple[fx.Node, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.classes = number_calls(self.graph)

    def meet(self, value: fx.Node, dim: int, number: int) -> None:
        """Note that a dim of a value is a batch of so many parts."""
        if (value, dim, number) not in self.met:
            self.met.add((value, dim, number))
            self.waiting.append((value, dim, number))

    def run(self) -> None:
        """Follow the batch to where it goes, and mark what has it in parts."""
        while self.waiting:
            value, dim, number = self.waiting.popleft()
            for call, rule, dims in self._calls(value, with_maker=number > 1):
                taken = in_parts(rule, dims[dim], number)
                if taken is not None:
                    self._follow(call, rule, taken)

    def _calls(
        self, value: fx.Node, with_maker: bool
    ) -> Iterator[tuple[fx.Node, Rule, tuple[Dim, ...]]]:
        """The calls that read a value, and what makes it, each with the dims that it has there."""
        for reader in value.users:
            if (rule := self._rule(reader)) is not None:
                for place, argument in enumerate(tensor_inputs(reader)):
                    if argument is value:
                        yield reader, rule, rule.inputs[place]
        if with_maker and (rule := self._rule(maker(value))) is not None:
            yield maker(value), rule, rule.outputs[result_index(value)]

    def _rule(self, call: fx.Node) -> Rule | None:
        if call.op != "call_function" or is_result(call):
            return None
        number = self.classes[call.name]
        if number not in self.rules:
            self.rules[number] = rule_of(call)
        return self.rules[number]

    def _follow(self, call: fx.Node, rule: Rule, taken: PartsCut) -> None:
        outputs = [(value, result_index(value)) for value in values_of(call)]
        for value, place in outputs:
            self._note(value, rule.outputs[place], taken.outputs[place], is_given=True)
            if place == 0 and value is not call:
                info(call).parts = info(value).parts
        for value, dims, cut in zip(tensor_inputs(call), rule.inputs, taken.inputs):
            self._note(value, dims, cut, is_given=False)

    def _note(self, value: fx.Node, dims: tuple[Dim, ...], cut: TensorCut, is_given: bool) -> None:
        """Mark one tensor of a call, if it has parts; what else reads a batch may have another."""
        if cut is None:
            return
        factor, number = cut
        dim = next(at for at, group in enumerate(dims) if factor in group)
        if number > 1:
            info(value).parts = tuple(sorted({*info(value).parts, (dim, number)}))
        if number > 1 or is_given:
            self.meet(value, dim, number)
