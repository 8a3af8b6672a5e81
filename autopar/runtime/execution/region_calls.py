"""Regions of a program that runs: each becomes one call, of a function that keeps less.

A region is what stands between its first and its last operator, wherever passes have put them. It
reads the same leaves as the rest of the program, and what it gives is read as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.runtime.execution.activation_offload import Keeper
from autopar.runtime.execution.profiler_ranges import function_of
from autopar.runtime.execution.recomputed_regions import Beside, Full, Leaving, Selective
from autopar.runtime.parameters.gathered_copies import Window
from autopar.strategies.node_info import RecomputeRegion, info

Runner = Full | Selective


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What calls read that they do not make, in the order in which it is first read."""
    own = set(nodes)
    read = (value for node in nodes for value in node.all_input_nodes)
    return [value for value in dict.fromkeys(read) if value not in own]


@dataclass(frozen=True)
class Part:
    """Some calls that follow one another: of one region, or of none."""

    nodes: tuple[fx.Node, ...]
    region: RecomputeRegion | None = None

    @property
    def inputs(self) -> list[fx.Node]:
        """What a region reads."""
        return inputs_of(self.nodes)

    @property
    def outputs(self) -> list[fx.Node]:
        """What a region gives to others."""
        own = set(self.nodes)
        return [node for node in self.nodes if not own.issuperset(node.users)]

    def runner(
        self, function: Callable[..., Any], beside: Sequence[Beside], keeper: Keeper | None
    ) -> Runner:
        """`function`, which makes the outputs from the inputs, as one that keeps less."""
        assert self.region is not None
        keep, leaving = self.region.how.keep, None
        if keep != "device":
            assert keeper is not None
            inputs = [info(value).away.get(self.region) for value in self.inputs]
            leaving = Leaving(keeper, inputs, keep == "host")
        if not self.region.is_full:
            return Selective(function, leaving)
        return Full(function, self.region.is_random, beside, leaving)


def parts_of(graph: fx.Graph) -> list[Part]:
    """The nodes of a graph in their order; a region is one part, and so is what lies in it."""
    nodes = list(graph.nodes)
    last = {info(node).region: index for index, node in enumerate(nodes)}
    found: list[Part] = []
    rest: list[fx.Node] = []
    index = 0
    while index < len(nodes):
        region = info(nodes[index]).region
        if region is None:
            rest.append(nodes[index])
            index += 1
            continue
        end = index + 1
        for at in range(index, last[region] + 1):
            if info(nodes[at]).region not in (region, None):
                break
            end = at + 1 if info(nodes[at]).region == region else end
        found += [Part(tuple(rest)), Part(tuple(nodes[index:end]), region)]
        rest, index = [], end
    return [part for part in [*found, Part(tuple(rest))] if part.nodes]


@dataclass(frozen=True)
class Around:
    """What regions of one program need of it."""

    beside: Sequence[Beside]  # what a second forward runs in
    plain: Mapping[fx.Node, Any]  # what makes the value of a call again that does more than that
    keeper: Keeper | None  # where regions keep what they do not keep where it is
    window: Window | None = None  # through which copies of parameters come and go


def call_regions(graph: fx.Graph, around: Around) -> None:
    """Let a program of one rank call its regions as functions, in place."""
    for part in parts_of(graph):
        if part.region is not None:
            _call(graph, part, around)


def _call(graph: fx.Graph, part: Part, around: Around) -> None:
    inputs, outputs = part.inputs, part.outputs
    inside, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for value in inputs:
        copies[value] = inside.placeholder(value.name)
    for node in part.nodes:
        copies[node] = inside.node_copy(node, copies.__getitem__)
    results = [copies[node] for node in outputs]
    inside.output(tuple(results) if len(results) != 1 else results[0])
    runner = part.runner(lambda *inputs: inputs, around.beside, around.keeper)
    for node in part.nodes:
        target: Any = copies[node].target
        reads, window = info(node).copies, around.window
        if not isinstance(runner, Selective):
            if reads and window is not None:
                copies[node].target = window.bringing(target, reads)
        elif info(node).remade:
            plain = around.plain.get(node, target)
            if reads and window is not None:
                plain = window.again()(window.bringing(plain, reads))
            copies[node].target = runner.noted(target, plain)
        elif (axes := info(node).away.get(part.region)) is not None:  # type: ignore[arg-type]
            copies[node].target = runner.leaves(target, axes)
    runner.function = function_of(inside)

    def region(*inputs: Any) -> Any:  # a function: fx wants its name
        return runner(*inputs)

    with graph.inserting_before(part.nodes[0]):
        call = graph.call_function(region, tuple(inputs))
        given = [call] if len(outputs) == 1 else _pieces(graph, call, len(outputs))
    for node, new in zip(outputs, given):
        new.meta = {**node.meta, **new.meta}
        node.replace_all_uses_with(new)
    for node in reversed(part.nodes):
        graph.erase_node(node)


def _pieces(graph: fx.Graph, call: fx.Node, count: int) -> Sequence[fx.Node]:
    return [graph.call_function(operator.getitem, (call, index)) for index in range(count)]
