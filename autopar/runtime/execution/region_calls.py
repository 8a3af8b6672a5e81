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

from autopar.runtime.execution.activation_offload import ActivationOffload
from autopar.runtime.execution.profiler_ranges import profiled_function
from autopar.runtime.execution.recomputed_regions import (
    ContextFactory,
    FullRecompute,
    RegionOffload,
    SelectiveRecompute,
)
from autopar.runtime.parameters.gathered_copies import GatherWindow
from autopar.strategies.node_info import RecomputeRegion, info

Runner = FullRecompute | SelectiveRecompute


def find_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What calls read that they do not make, in the order in which it is first read."""
    own = set(nodes)
    read = (value for node in nodes for value in node.all_input_nodes)
    return [value for value in dict.fromkeys(read) if value not in own]


@dataclass(frozen=True)
class GraphSection:
    """Some calls that follow one another: of one region, or of none."""

    nodes: tuple[fx.Node, ...]
    region: RecomputeRegion | None = None

    @property
    def inputs(self) -> list[fx.Node]:
        """What a region reads."""
        return find_inputs(self.nodes)

    @property
    def outputs(self) -> list[fx.Node]:
        """What a region gives to others."""
        own = set(self.nodes)
        return [node for node in self.nodes if not own.issuperset(node.users)]

    def runner(
        self,
        function: Callable[..., Any],
        beside: Sequence[ContextFactory],
        keeper: ActivationOffload | None,
    ) -> Runner:
        """`function`, which makes the outputs from the inputs, as one that keeps less."""
        assert self.region is not None
        keep, leaving = self.region.how.keep, None
        if keep != "device":
            assert keeper is not None
            inputs = [info(value).away.get(self.region) for value in self.inputs]
            leaving = RegionOffload(keeper, inputs, keep == "host")
        if not self.region.is_full:
            return SelectiveRecompute(function, leaving)
        return FullRecompute(function, self.region.is_random, beside, leaving)


def split_sections(graph: fx.Graph) -> list[GraphSection]:
    """The nodes of a graph in their order; a region is one part, and so is what lies in it."""
    nodes = list(graph.nodes)
    last = {info(node).region: index for index, node in enumerate(nodes)}
    found: list[GraphSection] = []
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
        found += [GraphSection(tuple(rest)), GraphSection(tuple(nodes[index:end]), region)]
        rest, index = [], end
    return [part for part in [*found, GraphSection(tuple(rest))] if part.nodes]


@dataclass(frozen=True)
class RegionSettings:
    """What regions of one program need of it."""

    beside: Sequence[ContextFactory]  # what a second forward runs in
    plain: Mapping[fx.Node, Any]  # what makes the value of a call again that does more than that
    keeper: ActivationOffload | None  # where regions keep what they do not keep where it is
    window: GatherWindow | None = None  # through which copies of parameters come and go


def call_regions(graph: fx.Graph, around: RegionSettings) -> None:
    """Let a program of one rank call its regions as functions, in place."""
    for part in split_sections(graph):
        if part.region is not None:
            _replace_by_call(graph, part, around)


def _replace_by_call(graph: fx.Graph, part: GraphSection, around: RegionSettings) -> None:
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
        if not isinstance(runner, SelectiveRecompute):
            if reads and window is not None:
                copies[node].target = window.gather_in_rerun(target, reads)
        elif info(node).remade:
            plain = around.plain.get(node, target)
            if reads and window is not None:
                plain = window.rerun_forward()(window.gather_in_rerun(plain, reads))
            copies[node].target = runner.noted(target, plain)
        elif (axes := info(node).away.get(part.region)) is not None:  # type: ignore[arg-type]
            copies[node].target = runner.leaves(target, axes)
    runner.function = profiled_function(inside)

    def region(*inputs: Any) -> Any:  # a function: fx wants its name
        return runner(*inputs)

    with graph.inserting_before(part.nodes[0]):
        call = graph.call_function(region, tuple(inputs))
        given = [call] if len(outputs) == 1 else _unpack_results(graph, call, len(outputs))
    for node, new in zip(outputs, given):
        new.meta = {**node.meta, **new.meta}
        node.replace_all_uses_with(new)
    for node in reversed(part.nodes):
        graph.erase_node(node)


def _unpack_results(graph: fx.Graph, call: fx.Node, count: int) -> Sequence[fx.Node]:
    return [graph.call_function(operator.getitem, (call, index)) for index in range(count)]
