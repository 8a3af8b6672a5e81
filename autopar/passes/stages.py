"""Stages: a rewritten program becomes one program for each stage of a pipeline.

    split_stages(flow, ["add_8", "add_16"])     # three stages; the second starts at add_8

Comes last, when every movement is in place. A stage receives the activations that cross its start
and returns those that cross its end: one that a later stage reads passes through those between.
What is made of inputs and constants alone (masks, positions, shifted labels), or of parameters
alone, is made again where it is read. A tied parameter so belongs to several stages, and the
runtime sums its gradient over them. Changes of buffers leave the stages: they are done once a
step, in the order of the micro-batches, from the statistics that a stage also returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.capture.verifier import verify
from autopar.errors import InvalidInput
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.passes.flow import Flow, ancestors, part_of
from autopar.passes.recomputation import stay_received
from autopar.strategies import traits_of
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class Stage:
    """One stage's program: its results are `sends`, the loss in the last stage, `statistics`."""

    index: int
    graph: fx.Graph
    receives: tuple[str, ...]  # placeholders, the activations of the stages before
    sends: tuple[str, ...]  # what the next stage receives
    has_loss: bool
    statistics: tuple[str, ...]  # what the update of its buffers reads
    update: fx.Graph | None  # from buffers and statistics to new buffers, by placeholder

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def learns_received(self) -> tuple[bool, ...]:
        """Which of the received values take a gradient."""
        return tuple(info(self.nodes[name]).differentiable for name in self.receives)

    @cached_property
    def learns_sent(self) -> tuple[bool, ...]:
        """Which of the sent values take a gradient."""
        return tuple(info(self.nodes[name]).differentiable for name in self.sends)

    def holds(self, kind: str) -> list[str]:
        """The names in the model of the parameters (buffers) of this stage."""
        graphs = [self.graph, *([self.update] if self.update is not None else [])]
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "placeholder"]
        return list(dict.fromkeys(info(n).origin[1] for n in nodes if info(n).origin[0] == kind))


def split_stages(flow: Flow, starts: Sequence[str], mesh: Mesh) -> tuple[Stage, ...]:
    """The stages that begin at the activations `starts`; the first is that of the first stage."""
    names = {node.name: position for node, position in flow.position.items()}
    points = [0, *(names[start] for start in starts[1:]), len(flow.activations)]
    stages = []
    for index in range(len(starts)):
        stage = cut_stage(flow, index, points[index], points[index + 1])
        verify(stage.graph, "moved", mesh)
        stages.append(stage)
    _all_updated(flow, stages)
    return tuple(stages)


def cut_stage(flow: Flow, index: int, start: int, end: int) -> Stage:
    """The stage between two cut points."""
    own = [node for node, position in flow.position.items() if start <= position < end]
    received, sent = flow.crossing(start), flow.crossing(end)
    statistics = [node for node in own if node in flow.statistics]
    has_loss = end == len(flow.activations)
    results = [*sent, *([flow.loss] if has_loss else []), *statistics]
    graph = part_of(flow.graph, [*results, *own], received)
    copies = {node.name: node for node in graph.nodes}
    for node in received:
        info(copies[node.name]).origin = ("received", node.name)
    stay_received(graph)
    for node in own:
        if node in flow.weight_inputs:
            info(copies[node.name]).weight_inputs = flow.weight_inputs[node]
    _end(graph, [copies[node.name] for node in results])
    return Stage(
        index,
        graph,
        receives=tuple(node.name for node in received),
        sends=tuple(node.name for node in sent),
        has_loss=has_loss,
        statistics=tuple(node.name for node in statistics),
        update=_update(flow, set(statistics), is_first=index == 0),
    )


def _update(flow: Flow, statistics: set[fx.Node], is_first: bool) -> fx.Graph | None:
    """The changes of buffers from the statistics of one stage; in the first, from none too."""
    changed = {}
    for buffer, value in flow.new_values.items():
        read = flow.read_by(value)
        if read <= statistics and (read or is_first):
            changed[buffer] = value
    if not changed:
        return None
    graph = part_of(flow.graph, changed.values(), statistics)
    copies = {node.name: node for node in graph.nodes}
    for node in statistics:
        info(copies[node.name]).origin = ("received", node.name)
    _read_shifts_as_they_were(graph)
    _end(graph, [copies[node.name] for node in changed.values()])
    info(graph.output_node()).buffers = tuple(changed)
    return graph


def _read_shifts_as_they_were(graph: fx.Graph) -> None:
    """Sums of batch norm go with the running mean that the step began with.

    What a shift is made of (a movement of the running mean) is made again from that."""
    nodes = list(graph.nodes)
    places = {node: place for node in nodes if (place := traits_of(node).shift) is not None}
    shifts = [node.args[place] for node, place in places.items()]
    made = ancestors([shift for shift in shifts if isinstance(shift, fx.Node)])
    first_call = next((node for node in nodes if node.op == "call_function"), None)
    before: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in places:
            place = places[node]
            shift = fx.map_arg(node.args[place], before.__getitem__)
            node.args = (*node.args[:place], shift, *node.args[place + 1 :])
        if node not in made:
            continue
        if node.op == "placeholder" and info(node).origin[0] == "buffer":
            assert first_call is not None
            with graph.inserting_before(first_call):
                before[node] = graph.placeholder(f"{node.name}_before")
            before[node].meta = {**node.meta, "origin": ("before", info(node).origin[1])}
        elif node.op == "placeholder":
            before[node] = node
        else:
            with graph.inserting_after(node):
                before[node] = graph.node_copy(node, before.__getitem__)
            before[node].meta = dict(node.meta)
    for node in reversed(nodes):
        if node in made and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _all_updated(flow: Flow, stages: Iterable[Stage]) -> None:
    done = {
        buffer
        for stage in stages
        if stage.update is not None
        for buffer in info(stage.update.output_node()).buffers
    }
    for buffer in flow.mutations:
        if buffer not in done:
            raise InvalidInput(
                "a buffer is changed from the values of one stage",
                got=f"{buffer} is changed from several",
                remedy="other stages (shard(module, stage=...)), or no pipeline",
            )


def _end(graph: fx.Graph, results: list[fx.Node]) -> None:
    output = graph.output(tuple(results))
    info(output).end(results)
    info(output).wants = tuple(Placement(info(node).type.layout) for node in results)
