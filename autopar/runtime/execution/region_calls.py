"""Turn each recomputed region of a program into one call, of a function that keeps less.

A region spans the nodes between its first and its last operator, wherever passes have put them.
The rest of the program reads its outputs as before.
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
    """Return the values that `nodes` read and do not make, in the order of their first reads."""
    inside = set(nodes)
    read = (value for node in nodes for value in node.all_input_nodes)
    return [value for value in dict.fromkeys(read) if value not in inside]


@dataclass(frozen=True)
class GraphSection:
    """Neighbouring nodes of one region, or of none."""

    nodes: tuple[fx.Node, ...]
    region: RecomputeRegion | None = None

    @property
    def inputs(self) -> list[fx.Node]:
        """Return the values that the section reads and does not make."""
        return find_inputs(self.nodes)

    @property
    def outputs(self) -> list[fx.Node]:
        """Return the nodes that others read."""
        inside = set(self.nodes)
        return [node for node in self.nodes if not inside.issuperset(node.users)]

    def runner(
        self,
        function: Callable[..., Any],
        contexts: Sequence[ContextFactory],
        offload: ActivationOffload | None,
    ) -> Runner:
        """Wrap `function`, which makes the outputs from the inputs, so that it keeps less.

        A second forward runs in `contexts`."""
        assert self.region is not None
        keep, region_offload = self.region.how.keep, None
        if keep != "device":
            assert offload is not None
            inputs = [info(value).away.get(self.region) for value in self.inputs]
            region_offload = RegionOffload(offload, inputs, keep == "host")
        if not self.region.is_full:
            return SelectiveRecompute(function, region_offload)
        return FullRecompute(
            function, is_random=self.region.is_random, contexts=contexts, offload=region_offload
        )


def split_sections(graph: fx.Graph) -> list[GraphSection]:
    """Split a graph into sections in order; nodes without a region inside of one belong to it."""
    nodes = list(graph.nodes)
    last = {info(node).region: index for index, node in enumerate(nodes)}
    sections: list[GraphSection] = []
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
        sections += [GraphSection(tuple(rest)), GraphSection(tuple(nodes[index:end]), region)]
        rest, index = [], end
    return [section for section in [*sections, GraphSection(tuple(rest))] if section.nodes]


@dataclass(frozen=True)
class RegionSettings:
    """The settings of one program that its regions share."""

    contexts: Sequence[ContextFactory]  # of a second forward
    plain: Mapping[fx.Node, Any]  # for calls that do more: the functions of their values alone
    offload: ActivationOffload | None  # None: every region keeps its values on the device
    window: GatherWindow | None = None  # through which copies of parameters come and go


def call_regions(graph: fx.Graph, settings: RegionSettings) -> None:
    """Replace the regions in a program of one rank by calls of functions, in place."""
    for section in split_sections(graph):
        if section.region is not None:
            _replace_by_call(graph, section, settings)


def _replace_by_call(graph: fx.Graph, section: GraphSection, settings: RegionSettings) -> None:
    inputs, outputs = section.inputs, section.outputs
    inside, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for value in inputs:
        copies[value] = inside.placeholder(value.name)
    for node in section.nodes:
        copies[node] = inside.node_copy(node, copies.__getitem__)
    results = [copies[node] for node in outputs]
    inside.output(tuple(results) if len(results) != 1 else results[0])
    runner = section.runner(lambda *inputs: inputs, settings.contexts, settings.offload)
    for node in section.nodes:
        target: Any = copies[node].target
        reads, window = info(node).copies, settings.window
        if not isinstance(runner, SelectiveRecompute):
            if reads and window is not None:
                copies[node].target = window.gather_in_rerun(target, reads)
        elif info(node).remade:
            plain = settings.plain.get(node, target)
            if reads and window is not None:
                plain = window.rerun_forward()(window.gather_in_rerun(plain, reads))
            copies[node].target = runner.recompute(target, plain)
        elif (axes := info(node).away.get(section.region)) is not None:  # type: ignore[arg-type]
            copies[node].target = runner.offloading(target, axes)
    runner.function = profiled_function(inside)

    def region(*inputs: Any) -> Any:  # a function: fx wants its name
        return runner(*inputs)

    with graph.inserting_before(section.nodes[0]):
        call = graph.call_function(region, tuple(inputs))
        new_outputs = [call] if len(outputs) == 1 else _unpack_results(graph, call, len(outputs))
    for node, new in zip(outputs, new_outputs):
        new.meta = {**node.meta, **new.meta}
        node.replace_all_uses_with(new)
    for node in reversed(section.nodes):
        graph.erase_node(node)


def _unpack_results(graph: fx.Graph, call: fx.Node, count: int) -> Sequence[fx.Node]:
    return [graph.call_function(operator.getitem, (call, index)) for index in range(count)]
